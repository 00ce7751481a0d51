"""Stand-ins for glibc and libstdc++ at link time, so that libraries built on a new system load on an old one.

    python link_stubs.py FOLDER CXX

Writes libc.so.6, libm.so.6 and libstdc++.so.6 without code into FOLDER. Each has the real one's symbols, but in the
newest version that a manylinux_2_28 system knows; the linker asks for the version that it finds. Symbols that are newer
altogether keep their version in glibc's; in libstdc++'s they are left out, and come from libstdc++.a.
"""

import re
import subprocess
import sys
from pathlib import Path

LIMITS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}
LIBRARIES = "libc.so.6", "libm.so.6", "libstdc++.so.6"


def number(version: str) -> tuple[int, ...] | None:
    """Of a version that is ordered: not of GLIBC_PRIVATE and the like."""
    found = re.fullmatch(r"[A-Z]+_(\d+(?:\.\d+)*)", version)
    return tuple(map(int, found[1].split("."))) if found else None


def symbols(library: Path) -> dict[str, tuple[str, str]]:
    """Name to (type, version) of everything that a stand-in defines."""
    listing = subprocess.run(
        ["readelf", "-W", "--dyn-syms", library], check=True, capture_output=True, text=True
    ).stdout
    known: dict[str, list[tuple[tuple[int, ...], str, str]]] = {}
    for line in listing.splitlines():
        words = line.split()
        if len(words) < 8 or words[6] in ("UND", "ABS", "Ndx") or "@" not in words[7]:
            continue
        name, _, version = words[7].partition("@")
        version = version.lstrip("@")
        at = number(version)
        if at is not None:
            known.setdefault(name, []).append((at, version, words[3]))
    chosen = {}
    for name, versions in known.items():
        old = [v for v in versions if v[0] <= LIMITS.get(v[1].split("_")[0], v[0])]
        if not old and "stdc++" in library.name:
            continue
        _, version, kind = max(old or versions)
        chosen[name] = kind, version
    return chosen


def write(library: Path, folder: Path, cxx: str) -> None:
    chosen = symbols(library)
    source, script = folder / f"{library.name}.s", folder / f"{library.name}.map"
    lines = [".text"]
    for k, (name, (kind, version)) in enumerate(sorted(chosen.items())):
        section = '.section .tdata,"awT",@progbits' if kind == "TLS" else ".data" if kind == "OBJECT" else ".text"
        of_type = {"TLS": "tls_object", "OBJECT": "object"}.get(kind, "function")
        lines += [section, f".globl s{k}", f".type s{k}, @{of_type}", f".size s{k}, 8", f"s{k}: .quad 0"]
        lines.append(f".symver s{k}, {name}@@{version}")
    source.write_text("\n".join(lines) + '\n.section .note.GNU-stack,"",@progbits\n')
    versions = sorted({version for _, version in chosen.values()})
    script.write_text("".join(f"{version} {{ }};\n" for version in versions) + "local_names { local: s[0-9]*; };\n")
    made = folder / library.name
    subprocess.run(
        [cxx, "-shared", "-nostdlib", "-o", made, source, f"-Wl,-soname,{library.name},--version-script,{script}"],
        check=True,
    )


def main() -> None:
    folder, cxx = Path(sys.argv[1]), sys.argv[2]
    folder.mkdir(parents=True, exist_ok=True)
    for name in LIBRARIES:
        found = subprocess.run([cxx, f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout
        write(Path(found.strip()).resolve(strict=True).parent / name, folder, cxx)


if __name__ == "__main__":
    main()
