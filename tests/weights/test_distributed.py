"""Two processes train a block-sparse model by DistributedDataParallel (gloo, on CPUs)."""

from support.helpers import run_python

CODE = """
import os, tempfile, time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from sbnet.nn import BlockSparseLinear


def model():
    torch.manual_seed(0)
    return nn.Sequential(BlockSparseLinear(40, 64, density=0.5, block_size=16), nn.ReLU(), nn.Linear(64, 4))


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(32, 40, generator=generator), torch.randn(32, 4, generator=generator)


def steps(net, x, y):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()


def worker(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    net = model()
    if rank == 1:  # overwritten by rank 0's: pattern's buffer, weights and biases
        with torch.no_grad():
            net[0].weight.zero_()
    net = DistributedDataParallel(net)
    x, y = data()
    steps(net, x[rank::2], y[rank::2])
    if rank == 0:
        alone = model()
        steps(alone, x, y)
        for got, want in zip(net.module.parameters(), alone.parameters()):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
        print("equal", flush=True)
    leave(rank, store)


def leave(rank, store):
    # Gloo's own end (destroy_process_group, destructors at exit) has hung after all was right: both wait for each other
    # by files and leave without it.
    open(f"{store}.{rank}", "w").close()
    while not os.path.exists(f"{store}.{1 - rank}"):
        time.sleep(0.05)
    os._exit(0)


def main():
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(worker, (os.path.join(folder, "store"),), nprocs=2, start_method="spawn")
"""


def test_two_processes_train_as_one(tmp_path):
    (tmp_path / "training.py").write_text(CODE)  # a module of its own: spawned processes import it
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import training; training.main()"
    result = run_python(code, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr[-2000:]
    assert "equal" in result.stdout
