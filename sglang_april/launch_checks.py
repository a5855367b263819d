"""What can be refused before SGLang is imported, which takes half a minute: a port in use, a damaged checkpoint."""

import argparse
import errno
import json
import socket
from collections.abc import Sequence
from pathlib import Path

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""What `--load-format auto` can read."""
TOKENIZERS = ("tokenizer*", "*.model", "vocab*", "*.tiktoken", "tekken.json")


def reason_not_startable(argv: Sequence[str]) -> str | None:
    """Why a server with these arguments cannot start, as a sentence without its full stop, or None."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--model-path", "--model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--tokenizer-path")
    parser.add_argument("--skip-tokenizer-init", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    try:
        args, _ = parser.parse_known_args(argv)
    except argparse.ArgumentError:  # SGLang reports it
        return None
    if args.help:
        return None
    return _port_in_use(args.host, args.port) or _damage_of(args) or None


def _damage_of(args: argparse.Namespace) -> str | None:
    if not args.model_path:
        return None
    has_tokenizer = args.skip_tokenizer_init or args.tokenizer_path
    return damage_of(args.model_path, args.load_format) or (None if has_tokenizer else no_tokenizer(args.model_path))


def _port_in_use(host: str, port: int) -> str | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port {port} of {host} is in use, perhaps by another server; choose another one with --port"
            if error.errno == errno.EACCES:
                return f"port {port} needs privileges that this user lacks; choose another one with --port"
    return None


def damage_of(model: str, load_format: str = "auto") -> str | None:
    """Why the checkpoint in the folder `model` cannot be loaded, or None. A name of a model hub, or a URL, is not
    checked.

    Args:
        load_format: SGLang's `--load-format`; weights are required only of `auto`, which reads WEIGHTS.
    """
    folder = Path(model)
    if not folder.exists():
        return f"--model-path {model} does not exist" if _looks_local(model) else None
    if folder.is_file():
        return None
    config = folder / "config.json"
    if not config.exists():
        return f"--model-path {model} has no config.json; it must be a Hugging Face folder"
    try:
        if not isinstance(json.loads(config.read_text()), dict):
            return f"--model-path {model} is damaged: its config.json is not a JSON object"
        index = folder / "model.safetensors.index.json"
        named = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else set[str]()
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"--model-path {model} is damaged: {type(error).__name__}: {error}"
    if missing := sorted(name for name in named if not (folder / name).exists()):
        return f"--model-path {model} is incomplete: {missing[0]} is missing ({len(missing)} of {len(named)} files)"
    if load_format == "auto" and not any(path for pattern in WEIGHTS for path in folder.glob(pattern)):
        return f"--model-path {model} has no weights: none of {', '.join(WEIGHTS)}"
    return next((reason for path in sorted(folder.glob("*.safetensors")) if (reason := _truncated(path))), None)


def _looks_local(model: str) -> bool:
    """Whether a path that does not exist is meant as one: hubs have names (`gpt2`) and owners with names."""
    if "://" in model:
        return False
    return (
        model.startswith(("/", "./", "../", "~"))
        or model.count("/") > 1
        or ("/" in model and Path(model).parent.is_dir())
    )


def no_tokenizer(model: str) -> str | None:
    """That the folder `model` has no file of a tokenizer, or a damaged one, or None."""
    folder = Path(model)
    if not folder.is_dir():
        return None
    if not any(path for pattern in TOKENIZERS for path in folder.glob(pattern)):
        return f"--model-path {model} has no tokenizer; --tokenizer-path names another folder that has one"
    for path in sorted(folder.glob("tokenizer*.json")):
        try:
            json.loads(path.read_text())
        except (OSError, ValueError) as error:
            return f"{path} is damaged: {type(error).__name__}: {error}"
    return None


def _truncated(path: Path) -> str | None:
    """Why a safetensors file is damaged, by its header (8 bytes of length, then JSON with the tensors' offsets)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if 8 + length > size:
            return f"{path} is damaged: its header is longer than the file"
        try:
            header = json.loads(file.read(length))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{path} is damaged: its header cannot be read"
    expected = 8 + length + end
    return f"{path} is truncated: {size:,} of {expected:,} bytes" if size < expected else None
