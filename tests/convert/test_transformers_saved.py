"""Converted models of transformers, saved, copied, compiled, reverted: the same again, or an error."""

import copy
import pickle

import numpy as np
import pytest
import torch
import transformers as hf
from test_transformers import NAMES, converted, each, plain
from torch.testing import assert_close

import infvit
from infvit.convert.transformers.attention import NAME
from infvit.errors import ConfigError
from infvit.testing.converted_transformers import Small, outputs

SOME = [NAMES[name] for name in ("DETR", "BERT", "Mistral")]


def trained(small: Small, **arguments):
    """Returns a converted model whose gammas are no longer those it began with."""
    model = infvit.convert(plain(small), **arguments)
    for name, parameter in model.named_parameters():
        if name.endswith("decay.logit"):
            torch.nn.init.normal_(parameter)
    return model


@each([NAMES[name] for name in ("ViT", "SigLIP vision, pooled", "RT-DETR", "T5 encoder", "GPT-2", "Gemma")])
def test_save_and_load_gives_the_converted_model(small, tmp_path):
    model = trained(small, gamma=0.4, activation="gelu")
    model.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert loaded.dtype == torch.float64
    assert not loaded.training
    # Buffers are made again, in another precision: the square root of a width in Gemma.
    assert_close(outputs(loaded, **small.call()), outputs(model, **small.call()), rtol=1e-4, atol=1e-6)
    assert not getattr(loaded, "is_quantized", False)
    loaded.half()  # which transformers refuses for a model that it takes for a quantised one


def test_save_load_and_save_again(tmp_path):
    converted(NAMES["BERT"]).save_pretrained(tmp_path / "first")
    loaded = hf.BertModel.from_pretrained(tmp_path / "first")
    infvit.convert(infvit.revert(loaded), gamma=0.2).save_pretrained(tmp_path / "second")
    again = hf.BertModel.from_pretrained(tmp_path / "second")
    assert {core.infsa.decay.initial for core in again.modules() if hasattr(core, "infsa")} == {0.2}
    infvit.revert(again).save_pretrained(tmp_path / "third")
    third = hf.BertModel.from_pretrained(tmp_path / "third", attn_implementation="eager")
    assert third.config._attn_implementation == "eager"
    assert not any(hasattr(module, "infsa") for module in third.modules())


def test_save_and_load_of_a_part(tmp_path):
    model = trained(NAMES["Llama"], include="layers.1")
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    call = {**NAMES["Llama"].call(), "attention_mask": torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]])}
    assert_close(outputs(loaded, **call), outputs(model, **call))
    assert not hasattr(loaded.model.layers[0].self_attn, "infsa")


@pytest.mark.parametrize(("name", "base"), [("BERT", "bert"), ("Llama", "model"), ("GPT-2", "transformer")])
def test_the_model_inside_one_with_a_head_is_saved_by_itself(name, base, tmp_path):
    config = NAMES[name].make().config
    kind = {"BERT": hf.BertForMaskedLM, "Llama": hf.LlamaForCausalLM, "GPT-2": hf.GPT2LMHeadModel}[name]
    torch.manual_seed(0)
    inner = getattr(infvit.convert(kind(config).eval(), gamma=np.float32(0.3)), base)
    inner.save_pretrained(tmp_path)
    loaded, call = type(inner).from_pretrained(tmp_path), NAMES[name].call()
    assert loaded.conversion_report.converted
    assert_close(loaded(**call)[0], inner(**call)[0])


def test_load_into_the_model_with_another_head(tmp_path):
    model = trained(NAMES["ViT"])
    model.save_pretrained(tmp_path)
    classifier = hf.ViTForImageClassification.from_pretrained(tmp_path, num_labels=3)
    call = NAMES["ViT"].call()
    assert_close(classifier.vit(**call)[0], model(**call)[0])
    classifier.save_pretrained(tmp_path / "classifier")
    assert_close(hf.ViTModel.from_pretrained(tmp_path / "classifier")(**call)[0], model(**call)[0])


def test_loading_without_infvit_fails_and_says_what_to_import(tmp_path, monkeypatch):
    converted(NAMES["ViT"]).save_pretrained(tmp_path)
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

    monkeypatch.delitem(hf.AttentionInterface._global_mapping, NAME)
    monkeypatch.delitem(AUTO_QUANTIZATION_CONFIG_MAPPING, NAME)
    monkeypatch.delitem(AUTO_QUANTIZER_MAPPING, NAME)
    with pytest.raises(ValueError, match=r'attn_implementation="infvit.convert.transformers"` is not supported'):
        hf.ViTModel.from_pretrained(tmp_path)


def test_a_model_made_from_the_configuration_of_a_converted_one_fails():
    model = converted(NAMES["BERT"])
    other = hf.BertModel(model.config)
    with pytest.raises(ConfigError, match="has to be converted itself"):
        other(**NAMES["BERT"].call())


def test_another_attention_implementation_afterwards_fails():
    model = infvit.convert(plain(NAMES["BERT"]))
    model.set_attn_implementation("sdpa")
    with pytest.raises(ConfigError, match=r"set to 'sdpa': use infvit.revert"):
        model(**NAMES["BERT"].call())


def test_weights_that_were_not_converted_are_not_converted_while_loading(tmp_path):
    plain(NAMES["ViT"]).save_pretrained(tmp_path)
    converted(NAMES["ViT"])
    from infvit.convert.transformers.saved import SavedConversions

    with pytest.raises(ConfigError, match="load them, then"):
        hf.ViTModel.from_pretrained(tmp_path, quantization_config=SavedConversions([]))


def test_a_quantised_model_is_refused():
    model = NAMES["ViT"].make()
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(ConfigError, match="quantised"):
        infvit.convert(model)


@each(SOME)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(small, copied):
    model = trained(small)
    twin = copied(model)
    assert_close(outputs(twin, **small.call()), outputs(model, **small.call()))
    for p in twin.parameters():
        p.data.zero_()
    assert all(p.any() for name, p in model.named_parameters() if "infsa" in name)


def test_pickle_of_a_process_that_converted_nothing():
    from infvit.convert.transformers import modules

    model = trained(NAMES["DeiT"])
    data = pickle.dumps(model)
    del modules.InfSADeiTAttention
    assert_close(outputs(pickle.loads(data), **NAMES["DeiT"].call()), outputs(model, **NAMES["DeiT"].call()))


@each([NAMES[name] for name in ("DINOv2", "SigLIP vision, pooled", "RT-DETR", "BERT", "T5 encoder", "Mistral")])
def test_revert_gives_the_model_back(small):
    model = infvit.convert(plain(small))
    keys = set(model.state_dict()) - set(plain(small).state_dict())
    assert len(keys) == small.layers
    assert all(key.endswith("infsa.decay.logit") for key in keys)
    model = infvit.revert(model)
    assert {type(m) for m in model.modules()} == {type(m) for m in plain(small).modules()}
    assert model.config.to_dict() == plain(small).config.to_dict()
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(outputs(model, **small.call()), outputs(plain(small), **small.call()))


def test_revert_gives_eager_back(tmp_path):
    model = NAMES["BERT"].make()
    model.set_attn_implementation("eager")
    changed = infvit.convert(model)
    assert infvit.revert(changed).config._attn_implementation == "eager"
    infvit.convert(model).save_pretrained(tmp_path)
    assert infvit.revert(hf.BertModel.from_pretrained(tmp_path)).config._attn_implementation == "eager"


def test_convert_twice_changes_nothing():
    model = trained(NAMES["Llama"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    again = infvit.convert(model, inplace=True)
    assert again is model
    assert not again.conversion_report.converted
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    outputs(again, **NAMES["Llama"].call())


def test_one_tower_of_clip():
    config = hf.CLIPConfig(
        text_config=NAMES["Llama"].make().config.to_dict()
        | {"model_type": "clip_text_model", "num_key_value_heads": 4},
        vision_config=NAMES["CLIP vision"].make().config.to_dict(),
        projection_dim=8,
    )
    model = hf.CLIPModel(config).eval()
    call = {"pixel_values": torch.randn(2, 3, 32, 32), "input_ids": NAMES["Llama"].call()["input_ids"]}
    before = model(**call)
    tower = infvit.convert(model, include="vision_model")
    after = tower(**call)
    assert_close(after.text_embeds, before.text_embeds)
    assert (after.image_embeds - before.image_embeds).abs().max() > 1e-4
    assert tower.config.text_config._attn_implementation == "sdpa"
    both = infvit.convert(model)(**call)
    assert (both.text_embeds - before.text_embeds).abs().max() > 1e-4


def clip() -> hf.CLIPModel:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = hf.CLIPConfig(
        text_config={**small, "vocab_size": 50, "eos_token_id": 2},
        vision_config=NAMES["CLIP vision"].make().config.to_dict(),
        projection_dim=8,
    )
    return larger(hf.CLIPModel(config))


def larger(model):
    """Gives a model weights so large that its attention is felt."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def test_towers_of_clip_come_back(tmp_path):
    image, text = {"pixel_values": torch.randn(2, 3, 32, 32)}, {"input_ids": NAMES["Llama"].call()["input_ids"]}
    for include in (None, "vision_model"):
        model = infvit.convert(clip(), include=include)
        model.save_pretrained(tmp_path / "whole")
        loaded = hf.CLIPModel.from_pretrained(tmp_path / "whole")
        assert torch.equal(loaded(**image, **text).logits_per_text, model(**image, **text).logits_per_text)
        model.vision_model.save_pretrained(tmp_path / "vision")
        for folder in ("whole", "vision"):
            tower = hf.CLIPVisionModel.from_pretrained(tmp_path / folder)
            assert torch.equal(tower(**image)[0], model.vision_model(**image)[0])
            assert (tower(**image)[0] - infvit.revert(tower)(**image)[0]).abs().max() > 1e-3
        tower = hf.CLIPTextModel.from_pretrained(tmp_path / "whole")
        assert torch.equal(tower(**text)[0], model.text_model(**text)[0])
        assert hasattr(tower.encoder.layers[0].self_attn, "infsa") == (include is None)


def test_an_encoder_of_a_composite_comes_back(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = hf.BertConfig(vocab_size=50, **sizes)
    decoder = hf.BertConfig(vocab_size=50, **sizes, is_decoder=True, add_cross_attention=True)
    parts = {"encoder": hf.BertModel(config), "decoder": hf.BertLMHeadModel(decoder)}
    model = infvit.convert(larger(hf.EncoderDecoderModel(**parts)))
    tokens = NAMES["BERT"].call()["input_ids"]
    model.save_pretrained(tmp_path / "whole")
    loaded = hf.EncoderDecoderModel.from_pretrained(tmp_path / "whole")
    call = {"input_ids": tokens, "decoder_input_ids": tokens}
    assert torch.equal(loaded(**call).logits, model(**call).logits)
    model.encoder.save_pretrained(tmp_path / "encoder")
    encoder = hf.BertModel.from_pretrained(tmp_path / "encoder")
    assert torch.equal(encoder(tokens)[0], model.encoder(tokens)[0])
    assert (encoder(tokens)[0] - infvit.revert(encoder)(tokens)[0]).abs().max() > 1e-3


def test_t5_comes_back(tmp_path):
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    tokens = NAMES["T5 encoder"].call()["input_ids"]
    plain_model = larger(hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=50, decoder_start_token_id=0, **sizes)))
    for include, layers in ((None, 2), ("encoder.*", 1), ("decoder.*", 1)):
        model = infvit.convert(plain_model, include=include)
        model.save_pretrained(tmp_path)
        loaded = hf.T5ForConditionalGeneration.from_pretrained(tmp_path)
        call = {"input_ids": tokens, "decoder_input_ids": tokens}
        assert torch.equal(loaded(**call).logits, model(**call).logits)
        assert sum(hasattr(module, "infsa") for module in loaded.modules()) == layers
        if include == "decoder.*":
            with pytest.raises(ConfigError, match="none of the modules"):
                hf.T5EncoderModel.from_pretrained(tmp_path)
        else:
            assert torch.equal(hf.T5EncoderModel.from_pretrained(tmp_path)(tokens)[0], model.encoder(tokens)[0])


@pytest.mark.parametrize("part", ["vision_model", "text_model.encoder.layers", "text_model.encoder.layers.0.self_attn"])
@pytest.mark.parametrize("inplace", [True, False])
def test_parts_that_were_converted_by_themselves_are_not_saved_as_softmax(part, inplace, tmp_path):
    model = clip()
    parent, _, name = part.rpartition(".")
    setattr(model.get_submodule(parent), name, infvit.convert(model.get_submodule(part), inplace=inplace))
    with pytest.raises(ConfigError, match=r"CLIPModel does not say so(.|\n)*include="):
        model.save_pretrained(tmp_path)
    model.load_state_dict(model.state_dict())
    infvit.convert(model, include=part, inplace=True)
    model.save_pretrained(tmp_path)
    call = {"pixel_values": torch.randn(2, 3, 32, 32), "input_ids": NAMES["Llama"].call()["input_ids"]}
    loaded = hf.CLIPModel.from_pretrained(tmp_path)
    assert torch.equal(loaded(**call).logits_per_text, model(**call).logits_per_text)
    infvit.revert(model).save_pretrained(tmp_path)
    assert not any(hasattr(module, "infsa") for module in hf.CLIPModel.from_pretrained(tmp_path).modules())


def test_a_base_model_converted_in_place_is_saved_with_its_head(tmp_path):
    model = larger(hf.ViTForImageClassification(NAMES["ViT"].make().config))
    infvit.convert(model.vit, inplace=True)
    model.save_pretrained(tmp_path)
    call = {name: value.float() for name, value in NAMES["ViT"].call().items()}
    assert torch.equal(hf.ViTForImageClassification.from_pretrained(tmp_path)(**call)[0], model(**call)[0])


def test_a_name_that_may_mean_several_modules_is_not_guessed(tmp_path):
    model = infvit.convert(clip())
    groups = model.config.quantization_config["conversions"]
    groups[0]["modules"] = ["encoder.layers.0.self_attn"]
    model.config.save_pretrained(tmp_path)
    model = infvit.revert(model)
    from safetensors.torch import save_file

    save_file(model.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"text_model.* or vision_model"):
        hf.CLIPModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("mechanism", ["infsa_pure", "softmax"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_one_attention_module_by_itself(mechanism, implementation):
    small = NAMES["Llama, grouped keys"]
    model = small.make()
    model.set_attn_implementation(implementation)
    expected = infvit.convert(model, mechanism, include="layers.0")
    attention = infvit.convert(model.model.layers[0].self_attn, mechanism, inplace=True)
    assert model.config._attn_implementation == implementation
    tokens = small.call()["input_ids"]
    real = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
    padded = {"attention_mask": real, "position_ids": (real.cumsum(-1) - 1).clamp(min=0)}
    for more in ({}, padded):
        result, whole = (outputs(x, input_ids=tokens, **more)[real.bool()] for x in (model, expected))
        assert_close(result, whole, rtol=1e-5, atol=1e-5)  # the eager softmax is computed in float32
    new = {"input_ids": tokens, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(**new), expected.generate(**new))
    infvit.revert(attention)
    assert attention.config is model.config
    assert_close(outputs(model, input_ids=tokens), outputs(small.make(), input_ids=tokens), rtol=1e-5, atol=1e-5)


def test_a_part_of_a_converted_model_reverted_by_itself(tmp_path):
    model = infvit.convert(NAMES["Llama"].make())
    infvit.revert(model.model.layers[0].self_attn)
    expected = infvit.convert(NAMES["Llama"].make(), include="layers.1")
    assert_close(outputs(model, **NAMES["Llama"].call()), outputs(expected, **NAMES["Llama"].call()))
    with pytest.raises(ConfigError, match="does not say so"):
        model.save_pretrained(tmp_path)
    infvit.convert(model, include="layers.1", inplace=True).save_pretrained(tmp_path)
    loaded = hf.LlamaForCausalLM.from_pretrained(tmp_path)
    assert_close(outputs(loaded, **NAMES["Llama"].call()), outputs(model, **NAMES["Llama"].call()))


def test_two_models_with_one_configuration_object():
    small = NAMES["ViT"]
    first = small.make()
    second = type(first)(first.config)
    infvit.convert(first, inplace=True)
    with pytest.raises(ConfigError, match="shares its configuration object"):
        second(**small.call())


def test_a_model_of_transformers_inside_another_one():
    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = NAMES["ViT"].make()

        def forward(self, x):
            return self.backbone(x)[0]

    model = infvit.convert(Wrapped())
    expected = outputs(infvit.convert(NAMES["ViT"].make()), **NAMES["ViT"].call())
    assert_close(model(NAMES["ViT"].call()["pixel_values"]), expected)


def test_gradient_checkpointing():
    model = infvit.convert(plain(NAMES["Llama"])).train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        outputs(model, **NAMES["Llama"].call()).square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert_close(gradients[1], gradients[0])


@pytest.mark.slow
@each([NAMES[name] for name in ("ViT", "BERT", "Llama, grouped keys")])
@torch.no_grad()
def test_compile_without_graph_breaks(small):
    config = small.make().config
    config.num_hidden_layers = 1
    model, call = infvit.convert(type(plain(small))(config).eval()), small.call()
    if small.inputs == "images":
        call = {name: value.float() for name, value in call.items()}
    if small.inputs == "text":
        call["attention_mask"] = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    if small.inputs == "causal":
        call["use_cache"] = False
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_close(compiled(**call)[0], model(**call)[0])
