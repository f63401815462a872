"""Reads what config.json and config_sentence_transformers.json say of a cross-encoder's score.

A cross-encoder reads two texts at once, and its classifier has one label: the score.
source: sentence-transformers 6.2, cross_encoder/model.py; transformers 5, configuration_utils.py
"""

from millrace.checkpoint.config.config_reader import CONFIG, Raw, wrong
from millrace.errors import CheckpointError

OLD_KEY = "sbert_ce_default_activation_function"  # before version 4 of sentence-transformers
KEYS = ("sentence_transformers", OLD_KEY)  # of config.json
ACTIVATION = "activation_fn"
_ACTIVATIONS = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid", "torch.nn.Sigmoid": "sigmoid",
    "torch.nn.modules.linear.Identity": "identity", "torch.nn.Identity": "identity",
}  # fmt: skip


def read_activation(raw: Raw) -> str:
    """Return "sigmoid" or "identity", applied to the classifier's output. raw: config.json. raises CheckpointError"""
    options = raw.get(KEYS[0])
    if not isinstance(options, dict | None):
        raise wrong(KEYS[0], options, "an object")
    if options and (value := options.get(ACTIVATION)) is not None:
        return activation_named(f"{KEYS[0]}.{ACTIVATION}", value)
    value = raw.get(OLD_KEY)
    return "sigmoid" if value is None else activation_named(OLD_KEY, value)


def activation_named(key: str, value: object, source: str = CONFIG) -> str:
    """Return the activation that `value` names. source: the file. raises CheckpointError"""
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise wrong(key, value, " or ".join(_ACTIVATIONS), "choose another cross-encoder", source)
    return _ACTIVATIONS[value]


def check_one_label(raw: Raw) -> None:
    """Check that the classifier has one label. raises CheckpointError for another number, 2 if nothing is said"""
    labels, number = raw.get("id2label"), raw.get("num_labels")
    if labels is not None:
        if not isinstance(labels, dict) or len(labels) != 1:
            raise _not_one("id2label", labels)
    elif number != 1 or isinstance(number, bool):
        raise _not_one("num_labels", number)


def _not_one(key: str, value: object) -> CheckpointError:
    return wrong(key, value, "one label, the score of two texts", "choose a cross-encoder (a reranker)")
