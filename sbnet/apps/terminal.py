"""What the commands of `sbnet` share: where they print, errors of one line, a device and a size as they are typed."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from sbnet.apps import machine, video
from sbnet.apps.pipeline.frames import PipelineError
from sbnet_command.options import Device

console = Console(highlight=False, emoji=False)  # ":x:" of a mask or a path is no picture
errors = Console(stderr=True, highlight=False, emoji=False)


class CommandError(Exception):
    """Something the person at the keyboard can put right; the message is one line."""


@contextmanager
def one_line_errors() -> Any:
    try:
        yield
    except BrokenPipeError:  # as after `| head`: typer ends quietly
        raise
    except (CommandError, PipelineError, video.VideoError, OSError) as error:  # OSError: a file that cannot be written
        errors.print(f"[red]sbnet: error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from None


def size_of(text: str) -> tuple[int, int]:
    height, _, width = text.lower().partition("x")
    if not (height.isdecimal() and width.isdecimal() and 1 <= int(height) <= 16384 and 1 <= int(width) <= 16384):
        raise typer.BadParameter(f"expected HEIGHTxWIDTH in pixels, such as 400x704, got {text!r}", param_hint="--size")
    return int(height), int(width)


def pick_device(wanted: Device) -> torch.device:
    if wanted is Device.cpu:
        return torch.device("cpu")
    obstacle = machine.cuda_obstacle()
    if wanted is Device.cuda and obstacle:
        raise CommandError(f"--device cuda: {obstacle}")
    return torch.device("cpu" if obstacle else "cuda")
