"""Converted models of transformers, saved, copied, compiled, reverted: the same again, or an error."""

import copy
import pickle

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


def test_one_tower_of_clip_comes_back_so(tmp_path):
    vision, text = NAMES["CLIP vision"].make().config.to_dict(), {"hidden_size": 16, "num_hidden_layers": 1}
    config = hf.CLIPConfig(
        text_config={**text, "num_attention_heads": 2, "vocab_size": 50, "intermediate_size": 16, "eos_token_id": 2},
        vision_config=vision,
        projection_dim=8,
    )
    tower = infvit.convert(hf.CLIPModel(config).eval(), include="vision_model")
    tower.save_pretrained(tmp_path)
    call = {"pixel_values": torch.randn(2, 3, 32, 32), "input_ids": NAMES["Llama"].call()["input_ids"]}
    assert_close(hf.CLIPModel.from_pretrained(tmp_path)(**call).logits_per_text, tower(**call).logits_per_text)


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
