"""Hugging Face models with a layout for attention: a causal or dense one gives what SDPA gives, padded and cached."""

from __future__ import annotations

import contextlib

import pytest
import torch

from sbnet import AttentionLayout
from sbnet.attention import register_attention
from sbnet.attention.padding import padded_attention
from sbnet.benchmarks.harness.nets import torchvision

with contextlib.suppress(ImportError):  # transformers imports it where it is there
    torchvision()
transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "AttentionMaskInterface"):
    pytest.skip("needs a transformers with AttentionMaskInterface", allow_module_level=True)

SIZES = {"vocab_size": 60, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(
        **SIZES, num_key_value_heads=2, intermediate_size=64, bos_token_id=1, eos_token_id=None, pad_token_id=0
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=60, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=None, pad_token_id=0
    ),
    "mistral": lambda: transformers.MistralConfig(
        **SIZES, num_key_value_heads=2, intermediate_size=64, sliding_window=16, eos_token_id=None, pad_token_id=0
    ),
}
LAYOUTS = {
    "sbnet_causal": AttentionLayout.causal(),
    "sbnet_dense": AttentionLayout.dense(),
    "sbnet_local": AttentionLayout.local(6),
    "sbnet_strided": AttentionLayout.strided(4),
    "sbnet_prefix": AttentionLayout.causal(prefix=3),
    "sbnet_blocks": AttentionLayout.from_blocks(torch.ones(3, 3).tril(), 8, causal=True),
}
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


@pytest.fixture(scope="module", autouse=True)
def _registered():
    for name, layout in LAYOUTS.items():
        register_attention(name, layout)


def pair(name, device, implementation="sbnet_causal"):
    """A model with SDPA, and the same with a layout."""
    torch.manual_seed(0)
    models = []
    for attention in ("sdpa", implementation):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=attention)
        models.append(model.to(device).eval())
    models[1].load_state_dict(models[0].state_dict())
    return models


def prompts(side, device, length=12):
    """Three prompts of other lengths, padded on a side, and their mask."""
    ids = torch.randint(1, 60, (3, length), device=device)
    mask = torch.ones_like(ids)
    for row, missing in enumerate((7, 0, 3)):
        if side == "left":
            mask[row, :missing] = 0
        elif side == "right":
            mask[row, length - missing :] = 0
        elif side == "within":
            mask[row, 2 : 2 + missing] = 0
    return ids * mask, mask


@pytest.mark.parametrize("side", ["none", "left", "right", "within"])
@pytest.mark.parametrize("how", ["dynamic", "static", "beams", "no cache"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_generate_gives_the_tokens_of_sdpa(name, how, side, device):
    theirs, ours = pair(name, device)
    ids, mask = prompts(side, device)
    more = {
        "dynamic": {},
        "static": {"cache_implementation": "static"},
        "beams": {"num_beams": 3},
        "no cache": {"use_cache": False},
    }[how]
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "disable_compile": True, **more}
    want = theirs.generate(ids, output_logits=True, return_dict_in_generate=True, **options)
    got = ours.generate(ids, output_logits=True, return_dict_in_generate=True, **options)
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_logits_of_padded_rows_and_of_a_cache_that_goes_on(name, side, device):
    """In one piece, and in three of which the last ones meet keys in a cache; gradients of the first."""
    theirs, ours = pair(name, device)
    ids, mask = prompts(side, device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    real = mask.bool()
    outputs = [m(ids, attention_mask=mask, position_ids=positions) for m in (theirs, ours)]
    torch.testing.assert_close(outputs[1].logits[real], outputs[0].logits[real], **CLOSE)
    grads = []
    for m, out in zip((theirs, ours), outputs, strict=True):
        m.zero_grad()
        out.logits[real].square().mean().backward()
        grads.append({n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None})
    for n, want in grads[0].items():
        torch.testing.assert_close(grads[1][n], want, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        cache, found = None, []
        for begin, end in ((0, 5), (5, 11), (11, 12)):
            out = ours(
                ids[:, begin:end], attention_mask=mask[:, :end], position_ids=positions[:, begin:end],
                past_key_values=cache, use_cache=True,
            )  # fmt: skip
            cache, found = out.past_key_values, [*found, out.logits]
        torch.testing.assert_close(torch.cat(found, 1)[real], outputs[0].logits[real], **CLOSE)


@pytest.mark.parametrize("side", ["left", "right", "within"])
@pytest.mark.parametrize("layout", ["sbnet_local", "sbnet_strided", "sbnet_prefix", "sbnet_causal"])
def test_a_padded_sequence_gives_what_it_gives_alone(layout, side, device):
    """Windows and strides count tokens, not padding; with a cache, too."""
    _, model = pair("llama", device, layout)
    ids, mask = prompts(side, device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, position_ids=positions).logits
        start = model(ids[:, :8], attention_mask=mask[:, :8], position_ids=positions[:, :8], use_cache=True)
        steps = [
            model(
                ids[:, k : k + 1], attention_mask=mask[:, : k + 1], position_ids=positions[:, k : k + 1],
                past_key_values=start.past_key_values, use_cache=True,
            ).logits
            for k in range(8, 12)
        ]  # fmt: skip
        for row in range(3):
            real = mask[row].bool()
            short = ids[row][real][None]
            rest = short.shape[1] % 4 if layout == "sbnet_strided" else 0
            alone = model(torch.nn.functional.pad(short, (0, 4 - rest if rest else 0))).logits[0, : short.shape[1]]
            torch.testing.assert_close(whole[row][real], alone, **CLOSE)
            if layout == "sbnet_prefix":
                continue  # shows queries keys behind them, which no cache has yet
            stepped = torch.cat([start.logits[row], *(s[row] for s in steps)])
            torch.testing.assert_close(stepped[real], alone, **CLOSE)


@pytest.mark.parametrize("side", ["none", "left", "right", "within"])
def test_bert(side, device):
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, intermediate_size=64, pad_token_id=0)
    theirs, ours = (
        transformers.BertModel._from_config(config, attn_implementation=a).to(device).eval()
        for a in ("sdpa", "sbnet_dense")
    )
    ours.load_state_dict(theirs.state_dict())
    ids, mask = prompts(side, device)
    with torch.no_grad():
        got, want = (m(ids, attention_mask=mask).last_hidden_state for m in (ours, theirs))
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("name", ["ViT", "DeiT", "Dinov2"])
def test_vision(name, device):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = getattr(transformers, f"{name}Config")(image_size=32, patch_size=8, **sizes)
    kind = getattr(transformers, f"{name}Model")
    theirs, ours = (kind._from_config(config, attn_implementation=a).to(device).eval() for a in ("sdpa", "sbnet_dense"))
    ours.load_state_dict(theirs.state_dict())
    x = torch.rand(2, 3, 32, 32, device=device)
    with torch.no_grad():
        torch.testing.assert_close(ours(x).last_hidden_state, theirs(x).last_hidden_state, **CLOSE)


def test_blocks_are_for_one_number_of_keys(device):
    """Those of a static cache, at every step."""
    theirs, ours = pair("llama", device, "sbnet_blocks")
    ids, mask = prompts("left", device)
    options = {"attention_mask": mask, "do_sample": False, "max_length": 24, "use_cache": False}
    with pytest.raises(ValueError, match=r"layout: expected one for 12 queries, got AttentionLayout\(1 x 3 x 3 blocks"):
        ours.generate(ids, **options)
    long = torch.nn.functional.pad(ids, (0, 12)), torch.nn.functional.pad(mask, (0, 12))
    with torch.no_grad():
        got, want = (m(long[0], attention_mask=long[1]).logits[long[1].bool()] for m in (ours, theirs))
    torch.testing.assert_close(got, want, **CLOSE)
    options |= {"use_cache": True, "cache_implementation": "static", "disable_compile": True}
    options |= {"max_length": None, "max_new_tokens": 13}  # 12 + 13 - 1 keys
    assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))


def test_a_window_that_is_wide_enough_says_nothing(device):
    theirs, ours = pair("mistral", device)
    ids, mask = prompts("left", device)
    with torch.no_grad():
        got, want = (m(ids, attention_mask=mask).logits[mask.bool()] for m in (ours, theirs))
    torch.testing.assert_close(got, want, **CLOSE)
    with pytest.raises(ValueError, match="sbnet_causal: expected a mask of padding, got one that says more"):
        ours(torch.randint(1, 60, (1, 40), device=device))


def test_what_no_layout_says_is_refused(device):
    _, ours = pair("llama", device)
    ids = torch.randint(1, 60, (1, 8), device=device)
    whole = torch.ones(1, 1, 8, 8, dtype=torch.bool, device=device).tril()
    with pytest.raises(ValueError, match=r"attention_mask: expected \[batch, tokens\], or none, got one of shape"):
        ours(ids, attention_mask=whole)
    packed = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]], device=device)
    with pytest.raises(ValueError, match="expected a mask of padding, got one that says more .*packed sequences"):
        ours(ids, position_ids=packed, use_cache=False)
    with pytest.raises(ValueError, match="output_attentions: expected False, got True"):
        ours(ids, output_attentions=True)
    from transformers import AttentionInterface

    q = torch.zeros(1, 4, 8, 16, device=device)
    attend = AttentionInterface()["sbnet_causal"]
    for argument in ("softcap", "position_bias", "s_aux"):
        with pytest.raises(ValueError, match=f"sbnet_causal: {argument}: expected none"):
            attend(ours, q, q, q, None, **{argument: torch.ones(1)})


def test_cross_attention_is_no_cache(device):
    """A causal layout has no meaning between two sequences; a dense one has."""
    sizes = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 60, "max_position_embeddings": 40}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    torch.manual_seed(0)
    config = transformers.BartConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    ours = transformers.BartModel._from_config(config, attn_implementation="sbnet_causal").to(device).eval()
    ids = torch.randint(3, 60, (1, 12), device=device)
    with pytest.raises(ValueError, match="sbnet_causal: expected self-attention, got attention to another sequence"):
        ours(input_ids=ids, decoder_input_ids=ids[:, :5])
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import bidirectional_mask_function

    q, k, v = (torch.randn(2, 4, n, 16, device=device) for n in (5, 12, 12))
    real = torch.arange(12, device=device) < torch.tensor([[9], [12]], device=device)
    sizes = {"batch_size": 2, "q_length": 5, "kv_length": 12, "device": device}
    mask = AttentionMaskInterface()["sbnet_dense"](
        **sizes, mask_function=bidirectional_mask_function, attention_mask=real
    )
    got, _ = AttentionInterface()["sbnet_dense"](ours, q, k, v, mask)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, real[:, None, None])
    torch.testing.assert_close(got, want.transpose(1, 2), **CLOSE)


def test_one_query_sees_no_key_that_is_not_there(device):
    """A prefix of three keys, of a sequence that has two."""
    q, k, v = (torch.randn(1, 2, n, 16, device=device) for n in (1, 6, 6))
    real = torch.tensor([[False, True, False, False, False, True]], device=device)
    got = padded_attention(q, k, v, AttentionLayout.causal(prefix=3), real, 5)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, real[:, None, None])
    torch.testing.assert_close(got, want, **CLOSE)
