"""Models of Hugging Face transformers, against themselves with the formula in place of their softmax."""

import copy
import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers as hf
from torch.testing import assert_close

import infvit
from infvit.attention import PureInfSA
from infvit.convert.transformers.attention import UNSUPPORTED
from infvit.errors import ConfigError
from infvit.testing.converted_transformers import MODELS, POOLED, FusedFormula, Small, outputs, positions

NAMES = {small.name: small for small in [*MODELS, POOLED]}
CAUSAL = [small for small in MODELS if small.inputs == "causal"]
TEXT = [small for small in MODELS if small.inputs == "text"]


@cache
def plain(small: Small) -> torch.nn.Module:
    return small.make()


@cache
def converted(small: Small, mechanism: str = "infsa_pure") -> torch.nn.Module:
    return infvit.convert(plain(small), mechanism)


def each(models):
    return pytest.mark.parametrize("small", models, ids=[small.name for small in models])


@each([*MODELS, POOLED])
def test_each_layer_is_converted_or_refused_by_name(small):
    report = converted(small).conversion_report
    assert (len(report.converted), len(report.refused)) == (small.layers, small.refused), str(report)
    assert all(entry.note for entry in report.refused)
    assert not hasattr(plain(small), "conversion_report")
    assert plain(small).config._attn_implementation == "sdpa"


@each([*MODELS, POOLED])
@torch.no_grad()
def test_every_layer_is_the_formula(small):
    # docs/convert-models.md, checked by test_table.py, has more; here: that the formula is felt in what is compared.
    softmax = outputs(plain(small), **small.call())
    with small.formula() as formula:
        expected = outputs(plain(small), **small.call())
    assert formula.calls == small.layers
    assert (expected - softmax).abs().max() > 1e-4
    assert_close(outputs(converted(small), **small.call()), expected, rtol=1e-9, atol=1e-9)


@each([NAMES[name] for name in ("ViT", "T5 encoder", "GPT-2", "Mistral")])
def test_softmax_as_a_mechanism_is_the_model_itself(small):
    assert_close(outputs(converted(small, "softmax"), **small.call()), outputs(plain(small), **small.call()))


@pytest.mark.parametrize("side", ["left", "right"])
@each(CAUSAL + TEXT)
@torch.no_grad()
def test_padding_leaves_real_tokens_as_they_are(small, side):
    model = converted(small)
    tokens = small.call()["input_ids"]
    real = torch.ones_like(tokens, dtype=torch.bool)
    real[1, slice(0, 3) if side == "left" else slice(4, 7)] = False
    places = {} if small.name.startswith("T5") else {"position_ids": positions(real)}
    result = outputs(model, input_ids=tokens * real, attention_mask=real.long(), **places)
    assert_close(result[0], outputs(model, input_ids=tokens[:1])[0])
    assert_close(result[1][real[1]], outputs(model, input_ids=tokens[1:][:, real[1]])[0])
    with FusedFormula("infsa_pure"):
        expected = outputs(plain(small), input_ids=tokens * real, attention_mask=real.long(), **places)
    assert_close(result[real], expected[real], rtol=1e-9, atol=1e-9)


def test_pixel_mask_of_detr():
    call, model = NAMES["DETR"].call(), converted(NAMES["DETR"])
    call["pixel_mask"] = torch.ones(2, 64, 64, dtype=torch.long)
    call["pixel_mask"][1, 32:] = 0
    with FusedFormula("infsa_pure"):
        expected = outputs(plain(NAMES["DETR"]), **call)
    assert_close(outputs(model, **call), expected)


def test_padded_pixels_of_detr_leave_the_others_as_they_are():
    encoder = converted(NAMES["DETR"]).model.encoder
    x, places = torch.randn(2, 1, 6, 32).double()
    real = torch.tensor([[True, True, True, True, False, False]])
    call = {"inputs_embeds": x, "spatial_position_embeddings": places}
    result = encoder(**call, attention_mask=real.long()).last_hidden_state
    short = {name: value[:, :4] for name, value in call.items()}
    assert_close(result[:, :4], encoder(**short).last_hidden_state)


@pytest.mark.parametrize(
    ("small", "mechanism"),
    [(small, "infsa_pure") for small in CAUSAL] + [(NAMES["Llama, grouped keys"], "infsa_linear")],
    ids=lambda value: getattr(value, "name", value),
)
@torch.no_grad()
def test_no_token_feels_a_later_one(small, mechanism):
    model, tokens = converted(small, mechanism), small.call()["input_ids"]
    before = outputs(model, input_ids=tokens)
    for place in (4, 6):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 5) % 45 + 3
        after = outputs(model, input_ids=changed)
        assert_close(after[:, :place], before[:, :place], rtol=0, atol=1e-13)
        assert (after - before)[:, place:].abs().amax((-1, -2)).min() > 1e-4


@each(CAUSAL + TEXT)
@torch.no_grad()
def test_word_order_matters(small):
    tokens = small.call()["input_ids"]
    swapped = tokens[:, [0, 2, 1, 3, 4, 5, 6]]
    difference = outputs(converted(small), input_ids=swapped) - outputs(converted(small), input_ids=tokens)
    assert difference[:, 0 if small in TEXT else 6].abs().max() > 1e-4


@each([NAMES["Llama"], NAMES["Mistral"]])
@torch.no_grad()
def test_packed_documents_do_not_feel_each_other(small):
    model, tokens = converted(small), small.call()["input_ids"]
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2]] * 2)
    packed = outputs(model, input_ids=tokens, position_ids=places, use_cache=False)
    assert_close(packed[:, :4], outputs(model, input_ids=tokens[:, :4]))
    assert_close(packed[:, 4:], outputs(model, input_ids=tokens[:, 4:]))


def test_bidirectional_use_of_a_decoder():
    small = NAMES["Llama"]
    with FusedFormula("infsa_pure"):
        expected = outputs(plain(small), **small.call(), is_causal=False)
    assert_close(outputs(converted(small), **small.call(), is_causal=False), expected)


def test_gemma_that_is_said_to_be_bidirectional_is_refused():
    """transformers' own functions disagree: under sdpa it is only without an attention_mask, under eager never."""
    config = NAMES["Gemma"].make().config
    config.use_bidirectional_attention = True
    with pytest.raises(ConfigError, match="use_bidirectional_attention: whether a token then sees later ones differs"):
        infvit.convert(hf.GemmaModel(config))


@pytest.mark.parametrize("window", [2, 4])
def test_full_and_sliding_layers_in_one_model(window):
    config = NAMES["Qwen3, 4 x 8"].make().config
    config.use_sliding_window, config.sliding_window = True, window
    config.layer_types = ["full_attention", "sliding_attention"]
    model = hf.Qwen3ForCausalLM(config).double().eval()
    tokens = NAMES["Qwen3, 4 x 8"].call()
    with FusedFormula("infsa_pure"):
        expected = outputs(model, **tokens)
    assert_close(outputs(infvit.convert(model), **tokens), expected, rtol=1e-9, atol=1e-9)
    report = infvit.convert(model, "infsa_linear").conversion_report
    assert "pairwise" in report.refused[0].note
    assert report.refused[0].name == "model.layers.1.self_attn"


def denoising_mask(sizes: tuple[int, ...], matching: int) -> torch.Tensor:
    """As RT-DETR makes it: groups see themselves and the matching queries, which see none of them."""
    number = torch.cat([torch.full((size,), i) for i, size in enumerate((*sizes, matching))])
    seen = (number[:, None] == number) | (number == len(sizes))
    return torch.zeros(len(number), len(number)).double().masked_fill(~seen, -torch.inf)


@torch.no_grad()
@pytest.mark.parametrize("convert", [lambda model: infvit.convert(model, "softmax"), infvit.convert])
def test_denoising_queries_of_rt_detr_leave_the_others_as_they_are(convert):
    attention = convert(NAMES["RT-DETR"].make()).model.decoder.layers[0].self_attn
    x = torch.randn(2, 12, 32).double()
    result = attention(hidden_states=x, attention_mask=denoising_mask((2, 3), 7))[0]
    assert_close(result[:, 5:], attention(hidden_states=x[:, 5:])[0])
    for group in (slice(0, 2), slice(2, 5)):
        alone = torch.cat([x[:, group], x[:, 5:]], 1)
        size = alone.shape[1] - 7
        expected = attention(hidden_states=alone, attention_mask=denoising_mask((size,), 7))[0][:, :size]
        assert_close(result[:, group], expected)


def test_training_of_rt_detr_with_denoising():
    def matching(model, labels):
        found = []
        attention = model.model.decoder.layers[0].self_attn
        with attention.register_forward_hook(lambda _m, _a, out: found.append(out[0])):
            torch.manual_seed(0)
            loss = model.train()(**NAMES["RT-DETR"].call(), labels=labels).loss
        loss.backward()
        assert loss.isfinite()
        assert found[0].shape[1] > model.config.num_queries
        return found[0][:, -model.config.num_queries :]

    model = infvit.convert(NAMES["RT-DETR"].make())
    labels = [[{"class_labels": torch.tensor([i]), "boxes": torch.tensor([[0.5, 0.5, 0.2 + i / 9, 0.2]]).double()}] * 2
              for i in (1, 2)]  # fmt: skip
    assert_close(matching(model, labels[0]), matching(model, labels[1]), rtol=0, atol=1e-12)


@each([NAMES[name] for name in ("BERT", "GPT-2", "Gemma", "DETR", "ViT")])
def test_linear_warns_on_language_and_detection(small):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        infvit.convert(plain(small), "infsa_linear")
    assert [str(warning.message)[:12] for warning in caught] == ["Linear InfSA"] * (small is not NAMES["ViT"])


@pytest.mark.parametrize("denoising", [100, 0])
def test_linear_trains_rt_detr_without_denoising_only(denoising):
    model = NAMES["RT-DETR"].make().float()
    config = copy.deepcopy(model.config)
    config.num_denoising = denoising
    with pytest.warns(UserWarning, match="same output"):
        model = infvit.convert(type(model)(config), "infsa_linear").train()
    call = {name: value.float() for name, value in NAMES["RT-DETR"].call().items()}
    call["labels"] = [{"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2]])}] * 2
    if denoising:
        with pytest.raises(ConfigError, match="masks over single query-key pairs"):
            model(**call)
    else:
        assert model(**call).loss.isfinite()


@each([NAMES[name] for name in ("ViT", "DETR", "T5 encoder", "Qwen3, 4 x 16, grouped keys")])
def test_gradients_reach_gamma_and_what_they_reached(small):
    reached = []
    for model in (plain(small), converted(small)):
        model.zero_grad()
        outputs(model, **small.call()).square().sum().backward()
        reached.append({name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()})
        model.zero_grad()
    gammas = {name for name in reached[1] if "infsa" in name}
    assert len(gammas) == small.layers
    assert reached[1] - gammas == reached[0]


def test_dropout_is_that_of_the_model_or_refused():
    config = NAMES["ViT"].make().config
    config.attention_probs_dropout_prob = 0.5
    torch.manual_seed(0)
    model = infvit.convert(hf.ViTModel(config)).train()
    x = torch.randn(2, 3, 32, 32)
    a, b = (model(x)[0] for _ in range(2))
    assert not torch.equal(a, b)
    assert torch.equal(model.eval()(x)[0], model(x)[0])
    for module in model.train().modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    with pytest.raises(ConfigError, match="convert again"):
        model(x)
    before = {name: value.clone().add_(0.5) for name, value in model.state_dict().items()}
    model.load_state_dict(before)
    again = infvit.convert(model, inplace=True)  # what was learned stays
    assert_close(again.state_dict(), before, rtol=0, atol=0)
    a, b = (again(x)[0] for _ in range(2))
    assert not torch.equal(a, b)


def test_a_dropout_that_a_mechanism_cannot_do_is_refused_when_it_is_asked_for_again():
    model = infvit.convert(plain(NAMES["ViT"]), "efficient").train()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    with pytest.raises(ConfigError, match="no weights between pairs of tokens to drop"):
        infvit.convert(model, "efficient")


@each([NAMES[name] for name in ("ViT", "BERT", "T5 encoder", "Llama, grouped keys", "Mistral")])
def test_output_attentions_is_the_mixing_matrix(small):
    model, values = converted(small), []
    attention = model.get_submodule(model.conversion_report.converted[0].name)
    hook = attention.infsa.register_forward_hook(lambda _m, args, out: values.append((args[2], out)))
    result = model(**small.call(), output_attentions=True)
    hook.remove()
    assert len(result.attentions) == small.layers
    assert result.attentions[0].shape[1] == 4
    norm = result.attentions[0].square().sum((-1, -2)).sqrt()
    if small in CAUSAL:
        assert not result.attentions[0].triu(1).any()
    else:
        assert_close(norm, torch.full_like(norm, 0.7), rtol=1e-3, atol=0)
        assert_close(result.attentions[0] @ values[0][0], values[0][1])
    assert_close(result[0], model(**small.call())[0])


def test_output_attentions_that_cannot_be_given_is_refused(monkeypatch):
    small = NAMES["BERT"]
    without = replace(PureInfSA.capabilities, matrix=False)
    with monkeypatch.context() as patch:
        patch.setattr(PureInfSA, "capabilities", without)
        with pytest.raises(ConfigError, match="no mixing matrix"):
            converted(small)(**small.call(), output_attentions=True)
    half = infvit.convert(plain(small), include="layer.0")
    with pytest.raises(ConfigError, match="not converted"):
        half(**small.call(), output_attentions=True)
    siglip = converted(NAMES["SigLIP vision, pooled"])
    with pytest.raises(ConfigError, match="output_attentions"):
        siglip(**NAMES["SigLIP vision, pooled"].call(), output_attentions=True)


def test_what_a_mechanism_lacks_is_refused():
    for name, lacking in (("T5 encoder", "bias"), ("Mistral", "pairwise")):
        with pytest.raises(ConfigError, match=f"nothing to convert(.|\n)*does not support.*{lacking}"):
            infvit.convert(plain(NAMES[name]), "infsa_linear")
    with pytest.raises(ConfigError, match=r"nothing to convert(.|\n)*does not support.*causal"):
        infvit.convert(plain(NAMES["Llama"]), "efficient")


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_no_mechanism_has_is_refused(name):
    with pytest.raises(ConfigError, match=r"does not support \w+"):
        outputs(converted(NAMES["Llama"]), **NAMES["Llama"].call(), **{name: torch.ones(1)})


def test_cross_attention_of_causal_decoders_is_refused_by_name():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    model = hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=50, decoder_start_token_id=0, **sizes)).eval()
    report = infvit.convert(model).conversion_report
    assert [entry.name for entry in report.refused] == ["decoder.block.0.layer.1.EncDecAttention"]
    assert "causal decoder" in report.refused[0].note
    assert len(report.converted) == 2


def test_modules_left_alone_compute_what_they_did():
    for small in (NAMES["Llama, grouped keys"], NAMES["T5 encoder"], NAMES["DETR"]):
        names = [entry.name for entry in converted(small).conversion_report.converted]
        half = infvit.convert(plain(small), include=names[0])
        assert len(half.conversion_report.converted) == 1
        call = small.call()
        if small.inputs != "images":
            call["attention_mask"] = torch.tensor([[1] * 7, [0] * 2 + [1] * 5])
        all_softmax = infvit.convert(half, "softmax", include=names[0])
        real = slice(None) if small.inputs == "images" else call["attention_mask"].bool()
        assert_close(outputs(all_softmax, **call)[real], outputs(plain(small), **call)[real])
        assert (outputs(half, **call) - outputs(plain(small), **call))[real].abs().max() > 1e-4


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "autocast"])
def test_half_precision(precision):
    small = NAMES["Llama, grouped keys"]
    expected = outputs(converted(small), **small.call())
    if precision == "autocast":
        model = infvit.convert(plain(small).float())
        plain(small).double()
        with torch.autocast("cpu", torch.bfloat16):
            result = outputs(model, **small.call())
    else:
        model = infvit.convert(infvit.convert(plain(small)).to(getattr(torch, precision)), "infsa_pure", gamma=0.7)
        assert {p.dtype for p in model.parameters()} == {getattr(torch, precision)}
        result = outputs(model, **small.call())
    assert (result.double() - expected).norm() / expected.norm() < 0.05
