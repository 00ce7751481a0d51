"""The polynomials of csrc/cpu/masked/conv_simd.h: exp and erf in float32, fitted here and printed as C++.

python tests/tools/fit_polynomials.py

Minimax by Lawson's iteration: weighted least squares whose weights follow the error. The weights that the target sets
make the error count in units of the float32 result's last place.
"""

from __future__ import annotations

import math

import numpy as np

SPLIT = 1.0  # of erf: a series below, 1 - exp(polynomial) above


def minimax(x: np.ndarray, wanted: np.ndarray, scale: np.ndarray, degree: int) -> np.ndarray:
    """Coefficients, highest power first, of the polynomial with the least max |scale * (p(x) - wanted)|."""
    weights = np.ones_like(x)
    powers = np.vander(x, degree + 1)
    best, least = np.zeros(degree + 1), math.inf
    for _ in range(400):
        rows = np.sqrt(weights) * scale
        found = np.linalg.lstsq(powers * rows[:, None], wanted * rows, rcond=None)[0]
        error = np.abs(scale * (powers @ found - wanted))
        if error.max() < least:
            best, least = found, error.max()
        weights *= error + 1e-30
        weights /= weights.sum()
    return best


def points(first: float, last: float, count: int = 4000) -> np.ndarray:
    """Denser at the ends, as Chebyshev's."""
    return first + (last - first) * (1 - np.cos(np.linspace(0, np.pi, count))) / 2


def fit_exponential() -> np.ndarray:
    """e of exp(r) = 1 + r + r^2 e(r) for |r| <= ln(2) / 2."""
    r = points(-math.log(2) / 2, math.log(2) / 2)
    r = r[np.abs(r) > 1e-4]
    return minimax(r, (np.expm1(r) - r) / r**2, r**2 / np.exp(r), 5)


def fit_erf_near() -> np.ndarray:
    """p of erf(x) = x + x p(x^2) for |x| <= SPLIT."""
    x = points(1e-3, SPLIT)
    erf = np.array([math.erf(v) for v in x])
    return minimax(x**2, erf / x - 1, x / erf, 6)


def fit_erf_far() -> np.ndarray:
    """p of erf(t) = 1 - exp(t p(t) - t) for t from SPLIT to 4, where erf rounds to 1."""
    t = points(SPLIT, 4.0)
    erfc = np.array([math.erfc(v) for v in t])
    return minimax(t, np.log(erfc) / t + 1, erfc * t, 7)


def main() -> None:
    for name, fit in (("exp", fit_exponential), ("erf near 0", fit_erf_near), ("erf beyond", fit_erf_far)):
        print(name, ", ".join(f"{np.float32(c):.8e}f" for c in fit()))


if __name__ == "__main__":
    main()
