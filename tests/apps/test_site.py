"""The site of docs/: it builds, strict, reads without the network, and looks like a site in a browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("material")
pytest.importorskip("mkdocstrings")
ROOT = Path(__file__).parents[2]
LOADED = {"link": "href", "script": "src", "img": "src", "source": "src", "iframe": "src"}


class Links(HTMLParser):
    """What a page loads, and where it leads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag in LOADED and found.get("rel") != "canonical":
            self.loaded.append(found.get(LOADED[tag]) or "")
        if tag == "a":
            self.links.append(found.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    found = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(target)], cwd=ROOT, text=True,
        capture_output=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    return target


def pages(site: Path) -> list[Path]:
    return sorted(site.rglob("*.html"))


def test_nothing_is_loaded_from_elsewhere(site):
    for page in pages(site):
        for address in Links(page.read_text()).loaded:
            assert not urlsplit(address).netloc, f"{page.name} loads {address}"


def test_links_lead_to_files_of_the_site(site):
    broken = []
    for page in pages(site):
        if page.name == "404.html":  # shown at any address
            continue
        for address in Links(page.read_text()).links:
            parts = urlsplit(address)
            if not parts.netloc and parts.path and not (page.parent / unquote(parts.path)).exists():
                broken.append(f"{page.relative_to(site)}: {address}")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("networks", ["sparsify", "SparseRun", "explain"]),
        ("ops", ["sparse_conv2d", "reduce_mask", "sparse_gather", "sparse_scatter"]),
        ("pipelines", ["Pipeline", "Cameras", "decoded"]),
        ("export", ["to_onnx", "session"]),
    ],
)
def test_the_reference_has_what_people_look_for(site, page, names):
    text = (site / "reference" / f"{page}.html").read_text()
    headings = set(re.findall(r'<h\d id="[\w.]*?(\w+)" class="doc', text))
    assert set(names) <= headings


# The first page and one of each kind, and what a reader sees on it.
SEEN = {
    "index": "Does it pay?", "first_hour": "A ResNet under a mask", "guide": "Your own network",
    "reference/ops": "sparse_conv2d", "kernels/index": "Kernels", "contracts": "Contracts", "log/conv": "Convolutions",
    "reports": "There are none yet",
}  # fmt: skip
BROWSERS = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"


@pytest.mark.slow
@pytest.mark.parametrize("page", SEEN)
def test_pages_in_a_browser(site, page, tmp_path):
    """What stands there, that nothing failed to load, and that there is something to look at. No name is resolved."""
    image = pytest.importorskip("PIL.Image")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("needs Chromium or Chrome")
    shot = tmp_path / "page.png"
    options = [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,1000",
        "--allow-file-access-from-files", "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=4000",
    ]  # fmt: skip
    address = (site / f"{page}.html").as_uri()

    def run(*more: str) -> subprocess.CompletedProcess:
        command = [browser, *options, *more, address]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    dom = run("--dump-dom")
    text = re.sub(r"<[^>]+>", "", dom.stdout)
    assert SEEN[page].lower() in text.lower()
    failed = [line for line in dom.stderr.splitlines() if "CONSOLE" in line and "Failed to load" in line]
    assert not failed, "\n".join(failed)
    run(f"--screenshot={shot}")
    with image.open(shot) as picture:
        assert picture.size == (1280, 1000)
        colours = len(picture.convert("RGB").getcolors(1 << 21) or [])
    assert colours > (5000 if page == "index" else 60)  # a photograph; text, code and a coloured bar
