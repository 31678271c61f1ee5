from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

setup(
    name="megatron-ciera",
    version="0.1.0",
    description="MoE training on Megatron-Core that communicates less, without changing what is trained",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["megatron_ciera", "megatron_ciera.*", "placement", "placement.*"]),
    package_data={"megatron_ciera": ["py.typed"], "placement": ["py.typed"]},
    python_requires=">=3.12",
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.19,<0.20",
        "numpy",
        "zstandard",  # entropy stage of the codecs on CPU
        "scipy",
        "pyyaml",
        "psutil",  # Megatron's torch_dist writer needs it and does not declare it
        "einops",  # likewise, with several distributed-optimizer instances
        "tqdm",
        "threadpoolctl",  # one BLAS thread while placements are fitted: the matrices are small
    ],
    extras_require={
        "nvcomp": ["nvidia-libnvcomp-cu13>=6,<7"],
        "plots": ["matplotlib"],
        "partitioners": ["mtkahypar"],
        "safetensors": ["safetensors"],
        "tensorboard": ["tensorboard"],
        "test": ["pytest", "hypothesis", "matplotlib", "safetensors"],
        "dev": ["ruff", "pre-commit"],
    },
    # The command lines of scripts/ that need no clone; training itself: python -m megatron_ciera SCRIPT.
    entry_points={
        "console_scripts": [
            "ciera-fit-placement = placement.cli_fit:main",
            "ciera-evaluate-placement = placement.cli_evaluate:main",
            "ciera-measure-stability = megatron_ciera.param_gather.codec.stability_cli:main",
            "ciera-loss-compare = megatron_ciera.comparison_cli:main",
            "ciera-report-run = megatron_ciera.report.cli:main",
            "ciera-simulate = megatron_ciera.simulator.cli:main",
            "ciera-measure-links = megatron_ciera.simulator.links:main",
        ]
    },
    classifiers=[
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
