"""Packaging of tff_dpftrl: a core of maths, and an extra with TensorFlow."""

import pathlib
import re

import setuptools

_HERE = pathlib.Path(__file__).parent
_VERSION = re.search(
    r'^__version__ = "([^"]+)"', (_HERE / "tff_dpftrl/version.py").read_text(), re.MULTILINE
).group(1)

setuptools.setup(
    name="tff_dpftrl",
    version=_VERSION,
    description=(
        "DP-FTRL for TensorFlow Federated: correlated-noise aggregators with honest privacy "
        "statements."
    ),
    long_description=(_HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The tff_dpftrl maintainers",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Security",
        "Typing :: Typed",
    ],
    packages=setuptools.find_packages(include=["tff_dpftrl", "tff_dpftrl.*"]),
    package_data={
        "tff_dpftrl": [
            "py.typed",
            "mechanisms/zoo/*.json",
            "training/configs/*.toml",
            "*/README.md",
            "*/*.proto",
            "*/*.pyi",
            "runtime/*/*.proto",
            "runtime/*/*.pyi",
            "runtime/status/assets/*",
        ]
    },
    python_requires=">=3.10",
    install_requires=["numpy>=1.22", "scipy>=1.9", "dp-accounting>=0.6", "typing-extensions>=4.4"],
    extras_require={
        # TensorFlow Federated 0.87 pins a jaxlib that is no longer published, and
        # dp-accounting 0.4.3: see "Environment" in README.md before using this extra.
        "tff": [
            "tensorflow-federated==0.87.0",
            "tensorflow-privacy==0.9.0",
            "tensorflow-text~=2.14.0",
            "matplotlib",
            "tqdm",
            "tomli; python_version < '3.11'",
        ],
        # Server and devices: plans and messages are protocol buffers, over gRPC; signatures of
        # plans and attestation tokens; leases and commits in SQLite or PostgreSQL by the same
        # statements; metrics for Prometheus; the status page; a faster event loop.
        "runtime": [
            "cryptography>=42",
            "grpcio>=1.60",
            "prometheus-client>=0.20",
            "protobuf>=4.25,<5",
            "SQLAlchemy>=1.4,<3",
            "tornado>=6.4",
            "uvloop>=0.19; sys_platform != 'win32'",
        ],
        # A driver for a store in PostgreSQL, by URL; built, so that no compiler is needed.
        "postgresql": ["psycopg2-binary>=2.9"],
        # Clients on Ray; beside the extra `tff`, and the same versions on every machine.
        "distributed": ["ray>=2.51,<2.53"],
        "plots": ["matplotlib"],
    },
    entry_points={"console_scripts": ["tff-dpftrl=tff_dpftrl.cli.main:main"]},
)
