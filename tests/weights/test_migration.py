"""The tables of docs/weights.md: every public name of blocksparse and pytorch_block_sparse, and where it went."""

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/weights.md"
BLOCKSPARSE = """
    ConvEdgeBias conv_edge_bias_init deconv_edge_bias_init cwise_linear embedding_lookup add multiply subtract divide
    maximum minimum negative reciprocal square sqrt exp log sigmoid tanh relu elu gelu swish fast_gelu filter_tensor
    filter_tensor_op scale_tensor float_cast dropout concrete_gate concrete_gate_infer add_n8 add_n replace_add_n
    restore_add_n bias_relu fancy_gather reduce_max assign_add gradients recomputable fused_lstm_gates split4 concat4
    sparse_relu FusedBasicLSTMCell grouped_lstm group_lstm_grads BlocksparseMatMul SparseProj block_reduced_full_dw
    group_param_grads get_bsmm_dx_ops layer_norm batch_norm Ema AdamOptimizer AdafactorOptimizer blocksparse_l2_decay
    blocksparse_norm blocksparse_prune clip_by_global_norm global_norm adafactor2d_op adafactor1d_op adam_op
    blocksparse_adam_op QuantizeSpec quantize log_stats BlocksparseTransformer softmax masked_softmax
    softmax_cross_entropy transpose_2d transpose_0213 top_k rectified_top_k clear_bst_constants entropy_size get_entropy
    set_entropy reset_scalar_constants scalar_constant ceil_div reduce_mul bst_conv_layout bst_deconv_layout
    dw_matmul_large_n BlocksparseConv BlocksparseDeconv batch_norm_inference masked_top_k_softmax ClipGlobalNorm
    IdentityInit group_dg_grads is_param_casted convert_gradient_to_tensor get_parents largest_block mpi_size allreduce
    group_allreduce reduce_scatter all_gather sync_variables_op sync_globals_zero_init_op serialize_allreduce_ops
    identity_sync check_group_params
"""  # what its __init__.py imports, and what its modules have beside (but for gradients, checks and shape arithmetic)
PYTORCH_BLOCK_SPARSE = """
    BlockSparseMatrix BlockSparseMatrixEmulator BlockSparseLinear BlockSparseModelPatcher SparseOptimizer
    PseudoBlockSparseLinear ModelPatcher SparseOptimizerStrategy MagnitudeSparseOptimizerStrategy OptimizerStateUpdater
    AdamOptimizerStateUpdater
"""


def table(which: int) -> dict[str, str]:
    """Name -> where it went."""
    part = PAGE.read_text().split("## Coming from", 1)[1].split("Those of pytorch_block_sparse:")[which]
    rows = [row for row in re.findall(r"^\| (.+?) \| (.+?) \|$", part, re.M) if row != ("name", "here")]
    return {name: home for names, home in rows for name in re.findall(r"`(\w+)`", names)}


def found(target: str) -> object:
    parts = target.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            value = getattr(value, part)
        return value
    raise AssertionError(f"{target}: no such module")


@pytest.mark.parametrize(("which", "names"), [(0, BLOCKSPARSE), (1, PYTORCH_BLOCK_SPARSE)])
def test_every_name_is_in_the_table_and_where_it_says(which, names):
    """A home that is a module has the name itself."""
    homes = table(which)
    assert sorted(homes) == sorted(names.split())
    for name, home in homes.items():
        targets = re.findall(r"`((?:sbnet|torch|math)\.[\w.]+)`", home)
        assert targets or home.startswith(("none", "not needed")), name
        for target in targets:
            value = found(target)
            assert callable(value if callable(value) else getattr(value, name)), (name, target)
