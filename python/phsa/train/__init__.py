"""Training of Hugging Face models with PHSA."""

try:
    import tomllib as _tomllib  # noqa: F401
except ImportError as error:
    raise ImportError("phsa.train needs Python 3.11 or newer") from error
try:
    import safetensors as _safetensors  # noqa: F401
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"phsa.train needs PyTorch, transformers and safetensors, and {error.name} is not installed here: pip install "
        "torch transformers safetensors, or pip install '.[train]' in a checkout of phsa"
    ) from error
