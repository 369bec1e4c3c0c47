"""The C extensions; everything else about the package is in pyproject.toml."""

from Cython.Build import cythonize
from setuptools import Extension, setup

NAMES = [
    "gateway.series",
    "gateway.otlp.rows",
    "gateway.otlp.registry",
    "gateway.otlp.wire",
    "gateway.forward.encode",
]

setup(
    ext_modules=cythonize(
        [Extension(name, [name.replace(".", "/") + ".pyx"], extra_compile_args=["-O3"]) for name in NAMES],
        language_level=3,
        compiler_directives={"boundscheck": False, "wraparound": False, "cdivision": True},
    )
)
