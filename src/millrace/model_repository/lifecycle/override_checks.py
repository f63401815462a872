"""What a configuration that a client gives with a load may not say."""

from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.request.status_code import Code, StatusError, invalid

CODE = ("python",)  # backends whose files are programs
# Triton's parameter that names an environment, and what a path in it may begin with.
ENVIRONMENT, MODEL_FOLDER = "EXECUTION_ENV_PATH", "$$TRITON_MODEL_DIRECTORY"
TRUSTED = "trusted_types"  # of the backend `sklearn`: what its files may be made of, beside what skops trusts


def check_config_override(given: ModelConfig, own: ModelConfig | None, *, with_files: bool = False) -> None:
    """A configuration that a client gave, beside that of the model's folder: it runs no program of the client's choice.

    with_files: which the client brought, too. raises StatusError
    """
    if with_files and given.backend in CODE:
        what = f"files of a load are not taken for backend '{given.backend}', which would run them as programs"
        raise StatusError(Code.UNSUPPORTED, f"{what}: put them into the repository")
    said = _said(given, ENVIRONMENT)
    if said and not said.startswith(f"{MODEL_FOLDER}/") and (own is None or said != _said(own, ENVIRONMENT)):
        what = f"{ENVIRONMENT} of model '{given.name}' is another one than its config.pbtxt has"
        raise invalid(f"{what}: a load may name environments in the model's folder alone ({MODEL_FOLDER}/...)")
    trusts = _said(given, TRUSTED) if given.backend == "sklearn" else ""
    if trusts and (own is None or trusts != _said(own, TRUSTED)):
        raise invalid(
            f"{TRUSTED} of model '{given.name}' are others than its config.pbtxt has, which alone may say them"
        )


def _said(config: ModelConfig, key: str) -> str:
    parameter = config.parameters.get(key)
    return parameter.string_value if parameter is not None else ""
