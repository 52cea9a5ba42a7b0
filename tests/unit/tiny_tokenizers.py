"""Character tokenizers small enough to read, built in memory."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))


def tiny_tokenizer(
    *, specials: tuple[str, ...] = (), eos: str = "<eos>", template: str | None = None
) -> PreTrainedTokenizerFast:
    """One token per printable character; `specials` are single tokens."""
    vocabulary = {token: index for index, token in enumerate([*dict.fromkeys((eos, *specials)), *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, additional_special_tokens=list(specials)
    )
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def chatml_tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer(specials=("<|im_start|>",), eos="<|im_end|>", template=CHATML)


def llama3_tokenizer() -> PreTrainedTokenizerFast:
    specials = ("<|start_header_id|>", "<|end_header_id|>", "<|bos|>")
    tokenizer = tiny_tokenizer(specials=specials, eos="<|eot_id|>", template=LLAMA3)
    tokenizer.bos_token = "<|bos|>"
    return tokenizer
