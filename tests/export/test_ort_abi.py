"""ONNX Runtime's ABI as it is written down here: csrc/ort_binding/ort_abi.h and docs/examples/cpp/ort_c_api.h.

Programs prove it, too: every test of this folder goes through the first, test_without_pytorch.py through the second.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPS = (ROOT / "csrc/ort_binding/ort_abi.h").read_text()
CLIENT = (ROOT / "docs/examples/cpp/ort_c_api.h").read_text()
SLOTS = {name: int(slot) for name, slot in re.findall(r"^  F\((\w+), (\d+),", OPS, re.M)}
CLIENT_SLOTS = {
    name: int(slot)
    for name, slot in re.findall(r"ORT_SLOT\((\w+), (\d+)\)", (ROOT / "docs/examples/cpp/ort_slots.h").read_text())
}
HEADER = "onnxruntime_c_api.h"
FOLDERS = (
    os.environ.get("ORT_INCLUDE_DIR", ""), "/usr/include", "/usr/include/onnxruntime", "/usr/local/include",
    "/usr/local/include/onnxruntime", "/usr/include/onnxruntime/core/session",
)  # fmt: skip


def compiles(text: str, *options: str) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    done = subprocess.run(
        ["g++", "-std=c++17", "-fsyntax-only", *options, "-x", "c++", "-"],
        input=text, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_tables_are_ordered_and_agree():
    assert len(SLOTS) == OPS.count("\n  F(") > 30
    assert list(SLOTS.values()) == sorted(set(SLOTS.values()))
    assert max(SLOTS.values()) < 284  # what GetApi(18) has
    both = SLOTS.keys() & CLIENT_SLOTS.keys()
    assert len(both) >= 6
    assert all(SLOTS[name] == CLIENT_SLOTS[name] for name in both)


def test_the_clients_header_has_every_call_in_its_slot():
    named = re.findall(r"\(\*(\w+)\)\(", re.search(r"struct OrtApi {\n(.*?)\n};", CLIENT, re.S)[1])
    assert set(named) == set(CLIENT_SLOTS)
    called = set(re.findall(r"ort->(\w+)", (ROOT / "docs/examples/cpp/main.cpp").read_text()))
    assert called == set(CLIENT_SLOTS)
    compiles('#include "ort_c_api.h"\n#include "ort_slots.h"\n', f"-I{ROOT / 'docs/examples/cpp'}")


def test_every_slot_against_the_official_header():
    found = next((f for f in FOLDERS if f and (Path(f) / HEADER).exists()), None)
    if found is None:
        pytest.skip(f"{HEADER} is not installed (ORT_INCLUDE_DIR); no pip or npm package has it")
    ops = re.search(r"struct OrtCustomOp {\n(.*?)\n};", OPS, re.S)[1]
    members = ["version", *re.findall(r"\(\*(\w+)\)\(", ops)]
    text = f"#include <cstddef>\n#include <{HEADER}>\n"
    for name, slot in (SLOTS | CLIENT_SLOTS).items():
        text += f"static_assert(offsetof(OrtApi, {name}) == {slot} * sizeof(void*));\n"
    for at, name in enumerate(members):
        text += f"static_assert(offsetof(OrtCustomOp, {name}) == {at} * sizeof(void*));\n"
    assert len(members) == 26
    compiles(text, f"-I{found}")
