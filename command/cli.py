"""The command `sbnet`: run a network on what matters of a video, export it, measure, tell what is installed.

A package of its own, as `import sbnet` imports torch, which takes seconds: options and their help are here, and what a
command does is imported once it is called.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from sbnet_command.options import Device, Dtype, Group
from sbnet_command.run import run

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Run convolutional networks on the active blocks of an image only.",
)
app.command()(run)


@app.command()
def density(
    path: Annotated[str, typer.Argument(metavar="SOURCE", help="As `sbnet run` takes it.")],
    mask: Annotated[str, typer.Option(help="As `sbnet run` takes it.")] = "motion:20",
    margin: Annotated[int, typer.Option(min=0, help="Pixels by which masks are grown.")] = 0,
    block: Annotated[int, typer.Option(min=1, max=1024, help="Side of a block, in pixels.")] = 16,
    frames: Annotated[int | None, typer.Option(min=1, help="Stop after this many frames.")] = None,
    size: Annotated[
        str | None, typer.Option(metavar="HEIGHTxWIDTH", help="Scale frames first, e.g. 400x704.", show_default="as is")
    ] = None,
    device: Annotated[Device, typer.Option(help="auto: a GPU if there is one that works.")] = Device.auto,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say how much of a video matters, and what networks gained at that: is it for me? Runs no network.

    The gains are those of recorded runs (docs/is_it_for_me.md), each frame's at its share of active blocks. `sbnet run`
    measures a network of your own.
    """
    from sbnet.apps.density import followed, measure
    from sbnet.apps.terminal import console, one_line_errors, pick_device, size_of

    plane = None if size is None else size_of(size)
    with one_line_errors():
        found = measure(path, mask, margin=margin, size=plane, block=block, limit=frames, device=pick_device(device),
                        follow=followed)  # fmt: skip
    if as_json:
        typer.echo(json.dumps({**found.facts(), "gains": found.gains()}, indent=2))
        return
    for table in found.tables():
        console.print(table)


@app.command()
def export(
    output: Annotated[Path, typer.Option("--output", "-o", help="The ONNX file to write.")],
    model: Annotated[
        str,
        typer.Argument(
            help="A network of sbnet.models: contours, resnet18, resnet34, resnet50 or sbnet; or of `sbnet run`: "
            "upscale:2, faces, text, birdseye, recognise:FILE."
        ),
    ] = "contours",
    weights: Annotated[
        str, typer.Option(metavar="SEED|FILE", help="Of a residual network: a seed, or a state dict (torchvision's).")
    ] = "0",
    classes: Annotated[
        int | None, typer.Option(min=0, help="Of a residual network; 0: its last feature map.", show_default="its own")
    ] = None,
    size: Annotated[str, typer.Option(metavar="HEIGHTxWIDTH", help="Size of the frames.")] = "400x704",
    batch: Annotated[int, typer.Option(min=1, help="Frames a call.")] = 1,
    block: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Side of a block, in pixels.", show_default="16; a residual network's own"),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="auto: float32.")] = Dtype.auto,
    fuse_bottlenecks: Annotated[
        bool,
        typer.Option("--fuse-bottlenecks", help="Blocks of three convolutions as one op: for Hopper GPUs, in halves."),
    ] = False,
    dynamic: Annotated[
        bool, typer.Option("--dynamic", help="Batch, height and width of each call; --size and --batch: an example.")
    ] = False,
    opset: Annotated[int, typer.Option(min=18, max=26, help="Of the standard ops.")] = 20,
    external_data: Annotated[
        bool, typer.Option("--external-data", help="Weights in a second file, OUTPUT.data, as past 1 GiB anyway.")
    ] = False,
) -> None:
    """Write a masked network as an ONNX model and compare ONNX Runtime's result with PyTorch's.

    Its inputs are x [N,3,H,W] and mask [N,H,W], its outputs y and, for contours, block_map. ONNX Runtime needs the
    library that `sbnet info --ort-library` names. Of a network of `sbnet run`, x and mask are what the pipeline makes
    of a frame, the margin is in the file, and cached ones take and give states; no result is compared.
    """
    import torch
    from rich.markup import escape

    from sbnet.apps.terminal import CommandError, console, one_line_errors, size_of

    frames = size_of(size)
    with one_line_errors():
        try:
            from sbnet.apps.pipeline.export import export_network
            from sbnet.apps.pipeline.trained import BUILDERS
            from sbnet.export import networks

            if model.partition(":")[0] in BUILDERS:
                if weights != "0" or classes is not None or batch != 1 or dynamic or fuse_bottlenecks or external_data:
                    raise CommandError(f"{model}: takes --size, --block, --dtype and --opset alone")
                dtype_of = torch.float32 if dtype is Dtype.auto else getattr(torch, dtype.value)
                export_network(model, output, frames, block=block or "auto", dtype=dtype_of, opset_version=opset)
                console.print(f"wrote {escape(str(output))}", soft_wrap=True)
                return
            if model == "contours" and (weights != "0" or classes is not None):
                raise CommandError("--weights, --classes: expected a residual network, got contours")
            kind = torch.float32 if dtype is Dtype.auto else getattr(torch, dtype.value)
            seed = int(weights) if weights.isdecimal() else weights
            built = networks.build(model, seed, block, classes, kind)
            networks.write(
                *built, output, frames, batch, dynamic, block, fuse_bottlenecks=fuse_bottlenecks, opset_version=opset,
                external_data=external_data or None,
            )  # fmt: skip
        except (ImportError, OSError, ValueError) as error:
            raise CommandError(str(error).splitlines()[0]) from None
    console.print(f"wrote {escape(str(output))}", soft_wrap=True)


@app.command()
def sparsify(
    model: Annotated[Path, typer.Argument(help="An ONNX model of standard ops; its first input is [N,C,H,W].")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The ONNX file to write.")],
    mask_input: Annotated[str, typer.Option(help="Name of the new input, the mask [N,H,W].")] = "mask",
    size: Annotated[
        str | None, typer.Option(metavar="HEIGHTxWIDTH", help="Size of the frames.", show_default="the model's")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Frames a call.", show_default="the model's, or 1")] = None,
    block: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Side of a block in every plane.", show_default="by the plane")
    ] = None,
    margin: Annotated[int, typer.Option(min=0, help="Pixels by which masks are grown.")] = 0,
) -> None:
    """Make a masked model of any ONNX convolutional network, and compare both in ONNX Runtime at a full mask.

    Where they differ beyond rounding nothing is written, and an earlier file stays. What has no sparse form stays
    standard ONNX ops. ONNX Runtime needs the library that `sbnet info --ort-library`
    names.
    """
    from rich.markup import escape

    from sbnet.apps.terminal import CommandError, console, one_line_errors, size_of

    frames = None if size is None else size_of(size)
    with one_line_errors():
        try:
            from sbnet.engine import explain
            from sbnet.export import foreign

            run, found = foreign.write(
                model, output, frames, batch, mask_input=mask_input, block=block or "auto", margin=margin
            )
        except (ImportError, OSError, ValueError) as fault:
            raise CommandError(str(fault).splitlines()[0].removeprefix("sbnet: ")) from None
        console.print(explain(run).summary, soft_wrap=True)
        console.print(f"wrote {escape(str(output))}", soft_wrap=True)
        console.print(f"rms difference from {escape(model.name)} at a full mask, both in ONNX Runtime: "
                      f"{found.difference:.2g} of {found.size:.2g}; rounding explains {found.limit:.2g}",
                      soft_wrap=True)  # fmt: skip


@app.command()
def bench(
    group: Annotated[Group, typer.Argument(help="What to measure.")] = Group.all,
    device: Annotated[Device, typer.Option(help="auto: a GPU if there is one that works.")] = Device.auto,
    only: Annotated[str, typer.Option(help="Cases whose titles hold all of these words; commas part choices.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="A few cases, as many as end within a minute.")] = False,
    cold: Annotated[bool, typer.Option("--cold", help="Flush the caches before each call.")] = False,
    eager: Annotated[bool, typer.Option("--eager", help="On CUDA, without CUDA graphs.")] = False,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="torch.compile among the dense forms.")
    ] = True,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds that a median is taken of.", show_default="7; 3 with --quick")
    ] = None,
    settle: Annotated[
        float, typer.Option(min=0, help="On CUDA, ms that a side runs alone before each of its turns: steady clocks.")
    ] = 0.0,
    time_budget: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds in which cases are to end.", show_default="none; 45 with --quick"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Result file (.jsonl) to write; a .csv of the same name goes beside it."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what --output holds, measure the rest.")] = False,
    share: Annotated[
        Path | None,
        typer.Option(help="What was measured in one .json file to attach to a report: no names, no paths."),
    ] = None,
    list_cases: Annotated[
        bool, typer.Option("--list", help="Print the titles of the cases, and nothing else.")
    ] = False,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="BEFORE AFTER", help="Compare two result files instead.")
    ] = None,
    threshold: Annotated[float, typer.Option(min=0, help="Share that counts as slower, with --compare.")] = 0.1,
    docs: Annotated[
        bool,
        typer.Option("--docs", help="Make docs/benchmarks.md and README's figures of benchmarks/results/ instead."),
    ] = False,
    tables: Annotated[
        Path | None, typer.Option(help="With --docs: every table and plot into this folder, and nothing else.")
    ] = None,
) -> None:
    """Measure ops, layers and networks against what one would run instead. Every result is checked before it is timed.

    Ctrl-C keeps what was measured. Exits with 1 at a wrong result, or where --compare finds a slower case.
    """
    from sbnet.apps.terminal import CommandError, console, one_line_errors, pick_device
    from sbnet.benchmarks.harness import command

    with one_line_errors():
        try:
            if tables is not None and not docs:
                raise CommandError("--tables: goes with --docs")
            if docs:
                command.make_documents(console, tables)
            elif compare is not None:
                if command.compare(*compare, threshold, console):
                    raise typer.Exit(1)
            else:
                chosen = "cuda" if pick_device(device).type == "cuda" else "cpu"
                groups = [g.value for g in Group if g is not Group.all] if group is Group.all else [group.value]
                setting = command.Setting(chosen, "quick" if quick else "full", compiled)
                if list_cases:
                    for case in command.cases(setting, groups, only):
                        typer.echo(case.title)
                    return
                if resume and output is None:
                    raise CommandError("--resume: expected --output, the file to go on with")
                budget = 45.0 if quick and time_budget is None else time_budget
                rounds = (3 if quick else 7) if rounds is None else rounds
                timer = command.Timer(chosen, rounds, eager=eager, cold=cold, settle=settle / 1e3)
                if not command.measure(setting, timer, groups, only, budget, output, resume, console, share):
                    raise CommandError("some results are wrong")
        except command.BenchError as error:
            raise CommandError(str(error)) from None


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ort_library: Annotated[
        bool, typer.Option("--ort-library", help="Print the path that ONNX Runtime registers, and nothing else.")
    ] = False,
    schemas: Annotated[
        bool,
        typer.Option(
            "--schemas", help="Print what ONNX Runtime's ops compute, take and give, as JSON, and nothing else."
        ),
    ] = False,
    layer: Annotated[
        str | None,
        typer.Option(help='Which kernel serves a layer, and why: "conv 3x3 64->64 400x704 fp16 [cpu] block 16".'),
    ] = None,
    capability: Annotated[
        int | None,
        typer.Option(
            help="Ask --layer of a GPU of this compute capability.", show_default="the devices that are there"
        ),
    ] = None,
) -> None:
    """Print versions, build flags, devices and library paths."""
    from rich.markup import escape
    from rich.table import Table

    from sbnet import _library
    from sbnet.apps import machine
    from sbnet.apps.terminal import console

    if layer:
        try:
            typer.echo(machine.kernel_of(layer, capability))
        except ValueError as wrong:
            raise typer.BadParameter(str(wrong), param_hint="--layer") from None
        return
    if ort_library:
        typer.echo(str(_library.KERNEL_LIBRARY))
        return
    if schemas:
        from sbnet.export import op_table

        told = ({"name": op["name"], "doc": op_table.OPS[op["name"]].doc, **op} for op in _library.ort_schemas())
        typer.echo(json.dumps(list(told), indent=2))
        return
    facts = machine.gather_info()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        if isinstance(fact, dict):
            fact = ", ".join(f"{key} {value or 'none'}" for key, value in fact.items())
        elif isinstance(fact, list):
            fact = "\n".join(fact)
        table.add_row(name, escape(str(fact)))
    console.print(table)


def main() -> None:
    """Entry point of the console script."""
    sys.path.append("")  # "module:name" of the folder that one stands in; last, so that it hides nothing
    app(prog_name="sbnet")


if __name__ == "__main__":
    main()
