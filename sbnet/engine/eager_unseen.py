"""What `sbnet.masked` would take wrongly without a word, refused by name: ops that it does not see, transforms of
functions, statistics of all pixels by other names than torch.nn's."""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from sbnet.engine.arguments import FLOATS
from sbnet.engine.modes import ENTERED
from sbnet.ops.common import constant_in_traces

if TYPE_CHECKING:
    from sbnet.engine.eager import masked

# Their statistics are of all pixels, where those of torch.nn.functional's are of active ones here.
STATISTICS = {
    "batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit",
    "_batch_norm_impl_index", "_batch_norm_with_update", "batch_norm_stats", "batch_norm_update_stats",
    "instance_norm", "group_norm", "native_group_norm",
}  # fmt: skip

_compiled: list[bool] = []  # was an op ever traced inside a context?
_watched: list[Any] = []  # kinds of torch.jit's callables


@constant_in_traces
def compiled_once() -> None:
    """To be called in every trace."""
    if not _compiled:
        _compiled.append(True)


def in_parts() -> bool:
    """May a step have been compiled in parts, whose notes are lost?"""
    return bool(_compiled)


def watch_scripts() -> None:
    """No mode sees what code of torch.jit computes, and without gradients it leaves no nodes either: from the first
    context on, its calls are looked at."""
    for kind in () if _watched else (torch._C.ScriptFunction, torch._C.ScriptMethod):
        _watched.append(kind)
        kind.__call__ = _looked_at(kind.__call__)  # type: ignore[method-assign]


def _looked_at(call: Any) -> Any:
    def run(script: Any, *args: Any, **kwargs: Any) -> Any:
        context: Any = getattr(ENTERED, "inside", None)
        for t in pytree.tree_leaves((args, kwargs)) if context else ():
            if isinstance(t, Tensor) and (context.is_map(t) or context.carries(t)):
                raise refused(f"a feature map given to {script.name} of torch.jit", "modules that run eagerly")
        return call(script, *args, **kwargs)

    return run


class Unseen:
    """Finds feature maps of code that no mode of functions sees: of torch.jit, of a replica in another thread, of C++.
    PyTorch numbers the nodes of a thread's graph: those made between two ops that were seen are of such code."""

    def __init__(self) -> None:
        self._next, self._between = torch.autograd._get_sequence_nr(), list[range]()
        self.others = False  # were there ops that were seen?
        watch_scripts()

    def before(self, context: masked, args: Any) -> None:
        """Raises where an op's arguments are such feature maps."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise refused("a transform of torch.func", "autograd, and batches as they are")
        now = torch.autograd._get_sequence_nr()
        if now != self._next:
            self._between.append(range(self._next, now))
        if not self._between or context.in_parts:
            return
        for x in args:
            if isinstance(x, Tensor) and x.grad_fn is not None and context.is_map(x) and not context.keeps(x):
                self._look_at(x.grad_fn)

    def after(self) -> None:
        self.others = True
        self._next = torch.autograd._get_sequence_nr()

    def _look_at(self, node: Any) -> None:
        if not any(node._sequence_nr() in made for made in self._between):
            return
        name = node.name()
        if name == "CheckpointFunctionBackward":
            raise refused("torch.utils.checkpoint inside of it", "the context in the function that is checkpointed")
        # Functions in Python make their nodes unseen, and what they call is seen.
        if not isinstance(node, torch.autograd.function.BackwardCFunction) or name == "GatherBackward":
            unseen = "code that PyTorch's modes do not see (torch.jit, DataParallel, C++)"
            raise refused(f"a feature map by {name} of {unseen}", "modules that run eagerly in its thread")


def refuse_statistics(name: str, args: Any, kwargs: dict[str, Any], what: str = "") -> None:
    """Raises where an op of feature maps takes statistics of all pixels."""
    if name not in STATISTICS:
        return
    given = args[5:6] or [kwargs[k] for k in ("training", "use_input_stats") if k in kwargs]
    own = given[0] if given else name != "batch_norm"
    if own or not name.endswith(("batch_norm", "instance_norm")):
        expected = "modules or functions of torch.nn, and maps [N,C,H,W]"
        raise statistics_refused(f"{name} {what}" if what else f"torch.{name}", expected)


def refuse_dtype(x: Tensor) -> None:
    """Raises where a map was cast to what no op on active blocks takes."""
    if x.dtype not in FLOATS:
        raise refused(f"one that became {x.dtype}", "maps of float32, float16 or bfloat16")


def refuse_convolution(context: masked, op: str, x: Tensor) -> None:
    """Raises where a convolution would run dense for what its input is, not for its batch."""
    if x.dim() != 4:
        raise refused(f"{op} of {list(x.shape)}", "batches [N,C,H,W]")
    if x.dtype not in FLOATS and x.shape[0] == context.mask.shape[0]:
        raise refused(f"{op} of {x.dtype}", "float32, float16 or bfloat16")


def statistics_refused(got: str, expected: str) -> NotImplementedError:
    return refused(f"{got}: its statistics would be of all pixels", expected)


def refused(got: str, expected: str) -> NotImplementedError:
    return NotImplementedError(f"sbnet: masked: expected {expected}, got {got}")


@functools.cache
def plainly_named(func: Any) -> Any:
    """torch.relu for torch.ops.aten.relu and its overload: it is known by that name. Functions in Python, as torch.stft
    and torch.cdist, take other arguments than the op of their name."""
    op = getattr(func, "overloadpacket", func)
    known = isinstance(op, torch._ops.OpOverloadPacket) and op._qualified_op_name.startswith("aten::")
    if not known or getattr(func, "_overloadname", "default") not in ("default", "Tensor"):
        return func
    found = getattr(torch, op.__name__, None)
    return found if isinstance(found, types.BuiltinFunctionType) else func
