"""Packaging of tff_dpftrl: a core of maths, and extras by what a user does."""

import pathlib
import re

import setuptools

_HERE = pathlib.Path(__file__).parent
_VERSION = re.search(
    r'^__version__ = "([^"]+)"', (_HERE / "tff_dpftrl/version.py").read_text(), re.MULTILINE
).group(1)

# Ranges are those that were tried: docs/reference/environments.md has the combinations.
_TENSORFLOW = ["tensorflow>=2.14"]  # With Keras 2 or 3, NumPy 1 or 2, whatever it asks for.
_TEXT = ["pyarrow>=14", "tomli; python_version < '3.11'"]
# Checkpoints and tokenizers in Hugging Face's layout.
_CHECKPOINTS = ["safetensors>=0.4", "tokenizers>=0.15"]
# MinHash, 100 kB of Python on what the core has: pretraining text that repeats users' text.
_NEAR_DUPLICATES = ["datasketch>=1.6"]
_PLOTS = ["matplotlib>=3.6"]
# Signed plans and messages as protocol buffers, over gRPC.
_PROTOCOL = ["cryptography>=45", "grpcio>=1.60", "protobuf>=4.25,<8"]
# Leases and commits in SQLite or PostgreSQL by the same statements; metrics for Prometheus; the
# status page; a faster event loop.
_SERVER = [
    *_TENSORFLOW,
    *_PROTOCOL,
    "prometheus-client>=0.20",
    "SQLAlchemy>=1.4,<3",
    "tornado>=6.4",
    "uvloop>=0.19; sys_platform != 'win32'",
]
# A registry shows the README without the other files: links and pictures become their words.
_README = re.sub(
    r"!?\[([^\]]*)\]\((?!https?:)[^)]*\)",
    r"\1",
    (_HERE / "README.md").read_text(encoding="utf-8"),
)
_EXTRAS = {
    # Processes, models and algorithms of TFF. TensorFlow Federated 0.87 pins a jaxlib that is no
    # longer published, and dp-accounting 0.4.3: see docs/reference/environments.md first.
    "tff": [
        "tensorflow-federated==0.87.0",
        "tensorflow-privacy==0.9.0",
        "tensorflow-text~=2.14.0",
        *_TEXT,
        *_CHECKPOINTS,
        *_NEAR_DUPLICATES,
        *_PLOTS,
    ],
    # Training, pretraining, fine-tuning, prediction, reports, export, audits.
    "finetuning": [*_TENSORFLOW, *_TEXT, *_CHECKPOINTS, *_NEAR_DUPLICATES, *_PLOTS],
    # A device, or a fleet of simulated ones.
    "devices": [*_TENSORFLOW, *_TEXT, *_PROTOCOL],
    # A server of tasks. To make them, add the extra `finetuning`.
    "server": _SERVER,
    "runtime": _SERVER,  # Its name in earlier versions.
    # A driver for a store in PostgreSQL, by URL; built, so that no compiler is needed.
    "postgresql": ["psycopg2-binary>=2.9"],
    # Clients on Ray; beside the extra `finetuning`, and the same versions on every machine.
    "distributed": ["ray>=2.51,<2.53"],
    "plots": _PLOTS,
    # The notebooks of colabs/, and the site.
    "docs": [
        *("ipykernel", "nbclient", "nbformat", *_PLOTS),
        *("furo", "myst-nb", "sphinx>=7", "sphinx-external-toc"),
    ],
    "dev": [
        "basedpyright",
        "grpcio-tools>=1.60",
        "hypothesis",
        "mpmath",
        "pytest>=8",
        "pytest-xdist",
        "ruff",
        "selenium",
    ],
}

setuptools.setup(
    name="tff_dpftrl",
    version=_VERSION,
    description=(
        "DP-FTRL for TensorFlow Federated: correlated-noise aggregators with honest privacy "
        "statements."
    ),
    long_description=_README,
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
            "data/english_words.txt",
            "mechanisms/zoo/*.json",
            "training/configs/*.toml",
            "*/README.md",
            "*/*.proto",
            "*/*.pyi",
            "runtime/*/*.proto",
            "runtime/*/*.pyi",
            "reports/page.css",
            "runtime/status/assets/*",
        ]
    },
    python_requires=">=3.10",
    install_requires=[
        "numpy>=1.22",
        "scipy>=1.9",
        "dp-accounting>=0.6",
        "tqdm>=4.60",
        "typing-extensions>=4.4",
    ],
    extras_require=_EXTRAS,
    entry_points={"console_scripts": ["tff-dpftrl=tff_dpftrl.cli.main:main"]},
)
