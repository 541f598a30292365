"""Text to tokens and back, exactly as megatron-core's engine does it.

What does it is imported where it is needed: a coordinator without a tokenizer never needs it.
"""

from typing import Any


def tokenize(tokenizer: Any, prompt: str, add_bos: bool) -> list[int]:
    """Tokenize a prompt, its BOS token included or stripped as the engine would.

    Args:
        tokenizer: A Megatron tokenizer.
        prompt: The text.
        add_bos: Whether the sampling parameters ask for a BOS token.
    """
    tokens: list[int] = _controller().tokenize_prompt(tokenizer, prompt, add_bos)
    return tokens


def generated_text(tokenizer: Any, reply: dict[str, Any]) -> str:
    """The text of a reply's generated tokens.

    Args:
        tokenizer: A Megatron tokenizer.
        reply: An unpacked reply with `generated_tokens` and `sampling_params`.
    """
    sampling = reply.get("sampling_params") or {}
    keep_stop = bool(sampling.get("detokenize_stop_sequence", False))
    text: str = _controller().detokenize(
        tokenizer, reply.get("generated_tokens") or [], remove_EOD=not keep_stop
    )
    return text


def _controller() -> Any:
    from megatron.core.inference.text_generation_controllers import text_generation_controller

    return text_generation_controller.TextGenerationController
