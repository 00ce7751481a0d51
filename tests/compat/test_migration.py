"""The tables of docs/migration.md: every public name of the four references, and where it is here."""

import importlib
import re
import types
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/migration.md"
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


SBNET = """
    reduce_mask sparse_gather sparse_scatter sparse_scatter_var cuda_timer_start cuda_timer_end calc_block_params
    calc_block_params_res_block convert_mask_to_indices convert_mask_to_block_indices convert_mask_to_indices_custom
    upsample_indices sparse_conv2d sparse_conv2d_custom sparse_conv2d_matmul res_block_bottleneck
    sparse_res_block_bottleneck mask_conv2d
"""  # its op library, and the functions of sparse_conv_lib.py
SPARSE_ATTENTION = """
    attention_impl blocksparse_attention_impl get_attn_mask strided_transpose split_heads merge_heads split_states
    merge_states get_blocksparse_obj get_callback recomputable
"""
LIBRARIES = {
    "blocksparse": BLOCKSPARSE,
    "pytorch_block_sparse": PYTORCH_BLOCK_SPARSE,
    "SBNet": SBNET,
    "sparse_attention": SPARSE_ATTENTION,
}


def table(library: str) -> dict[str, tuple[str, str]]:
    """Name -> where it is here, and what differs."""
    part = PAGE.read_text().split(f"\n## {library}\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| ?(.*?) ?\|$", part, re.M)[1:]
    return {name: (home, difference) for names, home, difference in rows for name in re.findall(r"`(\w+)`", names)}


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


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_name_is_in_the_table_and_where_it_says(library):
    """A home that is a module has the name itself; a name without a home says why."""
    homes = table(library)
    assert sorted(homes) == sorted(LIBRARIES[library].split())
    for name, (home, difference) in homes.items():
        if home == "none":
            assert difference, name
            continue
        (target,) = re.findall(r"`((?:sbnet|torch)[\w.]*)`", home)
        value = found(target)
        assert callable(getattr(value, name) if isinstance(value, types.ModuleType) else value), (name, target)


def test_nothing_else_in_the_package_reads_the_compatible_names():
    """They are for code from outside: the package itself has one name for a thing."""
    root = PAGE.parents[1]
    for folder in ("sbnet", "models", "export"):
        for file in (root / folder).rglob("*.py"):
            if "compat" not in file.relative_to(root).parts:
                assert "sbnet.compat" not in file.read_text(), file
