"""A family's names are defined once, in `config/families/`; everything else that names families knows the same ones."""

from millrace.checkpoint.config.families.all_families import FAMILIES
from millrace.checkpoint.gguf.architectures import ARCHITECTURES
from millrace.model import families


def test_what_a_checkpoint_may_say_is_what_a_model_is_built_of() -> None:
    assert {f.architecture for f in FAMILIES.values() if not f.is_encoder} == families.FAMILIES.keys()
    encoders = [f for f in FAMILIES.values() if f.is_encoder]
    assert {name for f in encoders for name in (f.architecture, f.cross_encoder) if name} == families.ENCODERS.keys()
    assert all(name == family.name for name, family in FAMILIES.items())


def test_files_of_one_name_families_by_the_same_names() -> None:
    assert set(ARCHITECTURES.values()) <= FAMILIES.keys()
