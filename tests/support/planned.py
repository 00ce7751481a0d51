"""Plans for CUDA, looked at on any machine."""

import copy

import torch
from torch import nn

from sbnet.graph.capture import capture
from sbnet.graph.constants import Constants
from sbnet.graph.functional import PlannedModule
from sbnet.graph.ir import Graph
from sbnet.graph.oracle import PlaneMasks, masked_oracle
from sbnet.graph.passes import optimise
from sbnet.graph.plan import plan
from support.contract import assert_holds
from support.networks import lively
from support.small_nets import SIZE


def for_cuda(net: nn.Module) -> Graph:
    """The graph of a plan for CUDA, which gives what the masked contract says, tried on the CPU."""
    graph = optimise(capture(lively(net.eval()), (torch.zeros(1, 3, *SIZE),)))
    planned = plan(graph, 4, device="cuda")
    run = PlannedModule(planned, Constants(graph, torch.device("cpu"), torch.float32))
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1, 3, *SIZE, generator=generator)
    mask = torch.zeros(1, *SIZE, dtype=torch.bool)
    mask[:, 3:9, 5:18] = True
    masks = PlaneMasks(mask, 4)
    with torch.no_grad():
        got, exact = run(x, mask), masked_oracle(copy.deepcopy(net).double(), [x.double()], masks)
    assert_holds(got, masked_oracle(net, [x], masks), exact, type(net).__name__)
    return planned.graph
