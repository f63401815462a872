"""Safety checks of a client's configuration override."""

from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.request.status_code import Code, StatusError, invalid

CODE = ("python",)  # backends whose files are executed
# Triton's parameter that names a Python environment, and the prefix for paths in the model's folder.
ENVIRONMENT, MODEL_FOLDER = "EXECUTION_ENV_PATH", "$$TRITON_MODEL_DIRECTORY"
TRUSTED = "trusted_types"  # of backend `sklearn`: types allowed in its files beyond those skops trusts


def check_config_override(config: ModelConfig, own: ModelConfig | None, *, with_files: bool = False) -> None:
    """Check that a configuration override cannot run code of the client's choice. own: the folder's configuration

    with_files: the client also sent files. raises StatusError
    """
    if with_files and config.backend in CODE:
        message = f"files of a load are not taken for backend '{config.backend}', which would run them as programs"
        raise StatusError(Code.UNSUPPORTED, f"{message}: put them into the repository")
    environment = _string_parameter(config, ENVIRONMENT)
    if (
        environment
        and not environment.startswith(f"{MODEL_FOLDER}/")
        and (own is None or environment != _string_parameter(own, ENVIRONMENT))
    ):
        message = f"{ENVIRONMENT} of model '{config.name}' is another one than its config.pbtxt has"
        raise invalid(f"{message}: a load may name environments in the model's folder alone ({MODEL_FOLDER}/...)")
    trusts = _string_parameter(config, TRUSTED) if config.backend == "sklearn" else ""
    if trusts and (own is None or trusts != _string_parameter(own, TRUSTED)):
        raise invalid(
            f"{TRUSTED} of model '{config.name}' are others than its config.pbtxt has, which alone may say them"
        )


def _string_parameter(config: ModelConfig, key: str) -> str:
    parameter = config.parameters.get(key)
    return parameter.string_value if parameter is not None else ""
