"""Every op and layer of the reference has an example, and it runs after the lines that the page begins with."""

import doctest
import inspect
import re
from pathlib import Path

import pytest
import torch

import sbnet
import sbnet.nn
import sbnet.ops

PAGES = {"ops": sbnet.ops, "nn": sbnet.nn}
DOCS = Path(__file__).parents[2] / "docs" / "reference"
NAMES = [(page, name) for page, module in PAGES.items() for name in module.__all__]


def first_lines(page: str) -> dict:
    """The names that a page's own code block makes."""
    if not DOCS.is_dir():
        pytest.skip("no source tree")
    (code,) = re.findall(r"^```python\n(.*?)^```", (DOCS / f"{page}.md").read_text(), re.M | re.S)
    names: dict = {}
    exec(code, names)
    return names


@pytest.mark.parametrize(("page", "name"), NAMES, ids=[name for _, name in NAMES])
def test_the_example_runs(page, name):
    torch.manual_seed(0)
    documented = inspect.unwrap(getattr(PAGES[page], name))
    test = doctest.DocTestParser().get_doctest(documented.__doc__ or "", first_lines(page), name, None, 0)
    assert test.examples, f"{name}: expected an example"
    last = test.examples[-1]
    assert name in "".join(example.source for example in test.examples)
    assert last.source.strip()
    said: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=said.append)
    assert not failed, "".join(said)
