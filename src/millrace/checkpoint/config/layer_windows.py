"""Reads which layers of a decoder have a window, and which have rotary positions."""

from typing import cast

from millrace.checkpoint.config.config_reader import ConfigReader, wrong

LATER_GEMMAS = ("gemma2", "gemma3_text")
WINDOWED = (
    "mistral",
    "starcoder2",
    "phi3",
    "olmo3",
    "exaone4",
    "cohere2",
    "mixtral",
    "phimoe",
    "gpt_oss",
    *LATER_GEMMAS,
)  # families with windows by default
SWITCHED_WINDOWS = ("qwen2", "qwen3", "smollm3", "qwen2_moe", "qwen3_moe")  # families with use_sliding_window
CONVOLVING = ("lfm2", "lfm2_moe")  # families with short convolutions


def read_rotates(read: ConfigReader, n_layers: int) -> tuple[bool, ...]:
    """Return whether each layer has rotary positions; () if all have."""
    if read.family.name in ("exaone4", "cohere2") and read.get("sliding_window") is not None:
        windows = read_windows(read, n_layers, ())
        return tuple(window > 0 for window in windows)
    if read.family.name == "cohere2":
        return (False,) * n_layers
    if read.family.name != "smollm3":
        return ()
    flags = read.get("no_rope_layers")  # 1: the layer has rotary positions
    if flags is None:
        interval = read.positive_int("no_rope_layer_interval")
        flags = [int((layer + 1) % interval != 0) for layer in range(n_layers)]
    if not isinstance(flags, list) or len(flags) < n_layers or not all(flag in (0, 1) for flag in flags):
        raise wrong("no_rope_layers", flags, f"a list of 0 or 1 for each of {n_layers} layers")
    rotates = tuple(bool(flag) for flag in flags[:n_layers])
    return () if all(rotates) else rotates


def read_windows(read: ConfigReader, n_layers: int, rotates: tuple[bool, ...]) -> tuple[int, ...]:
    """Return the window of each layer, like transformers' configuration classes; 0: none."""
    if read.family.name in CONVOLVING:
        return ()
    types = read.get("layer_types")
    named = isinstance(types, list) and len(types) == n_layers and all(isinstance(kind, str) for kind in types)
    if types is not None and not named:
        raise wrong("layer_types", types, f"a list of {n_layers} names, one per layer")
    name, first, window = read.family.name, 0, 0
    if name in WINDOWED or (name in SWITCHED_WINDOWS and read.get("use_sliding_window") not in (None, False)):
        window = 0 if read.get("sliding_window") is None else read.positive_int("sliding_window")
    if types is not None:
        kinds = cast(list[str], types)
        allowed = {"full_attention", "sliding_attention"} if window else {"full_attention"}
        if name == "mistral" and window:
            # transformers gives every Mistral layer the window, whatever layer_types says
            allowed = {"sliding_attention"}
        if not set(kinds) <= allowed:
            if not window and name in WINDOWED and "sliding_attention" in kinds:
                raise wrong("sliding_window", read.get("sliding_window"), "tokens of the layers with sliding_attention")
            raise wrong("layer_types", sorted(set(kinds)), "only " + " and ".join(sorted(allowed)))
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds) if window else ()
    if name in ("qwen2", "qwen3", "qwen2_moe") and window:
        result = read.get("max_window_layers")
        if isinstance(result, bool) or not isinstance(result, int) or result < 0:
            raise wrong("max_window_layers", result, "a number of layers")
        first = result
    if name == "smollm3":  # layers without rotary positions have the window
        return tuple(0 if rotates[layer] else window for layer in range(n_layers)) if window and rotates else ()
    if name in _FULL_EVERY:
        every = _FULL_EVERY[name] or read.positive_int("sliding_window_pattern", missing=6)
        return tuple(window if (layer + 1) % every else 0 for layer in range(n_layers)) if window else ()
    return tuple(window if layer >= first else 0 for layer in range(n_layers)) if window else ()


# Of how many layers one has full attention if config.json does not list them; 0: sliding_window_pattern says so.
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 0, "olmo3": 4, "exaone4": 0, "cohere2": 0, "gpt_oss": 2}
