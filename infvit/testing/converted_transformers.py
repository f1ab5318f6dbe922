"""Small models of Hugging Face transformers with random weights, for checks of `convert`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from infvit.testing.conversion import Formula
from infvit.testing.converted import Subject

Options = dict[str, Any]


class FusedFormula(Formula):
    """Takes the place of fused attention only: RT-DETR weighs its sampled points by a softmax that is no attention."""

    def _softmax(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return original


@dataclass(frozen=True)
class Small:
    """One model.

    Attributes:
        name: for tables.
        build: makes it, in evaluation mode, with weights large enough that its tokens differ.
        inputs: what its forward takes: images, a bidirectional or a causal text.
        layers: modules of attention that are converted.
        refused: modules of attention that are not.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: str
    layers: int = 2
    refused: int = 0

    def make(self) -> nn.Module:
        """Builds the model in float64."""
        torch.manual_seed(0)
        model = self.build()
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=(parameter[0].numel()) ** -0.5)
            elif name.endswith("bias"):
                nn.init.normal_(parameter, std=0.2)
        return model.double().eval()

    def call(self) -> dict[str, Tensor]:
        """Returns arguments of its forward, two samples."""
        generator = torch.Generator().manual_seed(1)
        if self.inputs == "images":
            side = 64 if "DETR" in self.name else 32
            return {"pixel_values": torch.randn(2, 3, side, side, generator=generator, dtype=torch.float64)}
        return {"input_ids": torch.randint(3, 50, (2, 7), generator=generator)}

    @property
    def linear(self) -> bool:
        """Whether Linear InfSA can stand in: not for a position bias, and not under a sliding window."""
        return self.name not in ("T5 encoder", "Mistral")

    @property
    def pooling(self) -> bool:
        """Whether it pools by nn.MultiheadAttention, which calls softmax itself."""
        return self.name.endswith("pooled")

    def formula(self, mechanism: str = "infsa_pure") -> Formula:
        """Returns the formula that takes the place of the model's softmax."""
        return Formula(mechanism, head_dim=8) if self.pooling else FusedFormula(mechanism)

    def subject(self) -> Subject:
        """Returns it as one of the table of converted models."""
        text = self.inputs != "images"
        given = {**self.call(), **self._uncached()}  # made here: torch.compile cannot trace a generator of numbers
        return Subject(
            library="transformers",
            name=self.name,
            build=self._reached,
            call=lambda model: outputs(model, **given),
            linear=self.linear,
            causal=self._earlier if self.inputs == "causal" else None,
            padding=self._padded if text else None,
            formula=FusedFormula,
        )

    def _uncached(self) -> dict[str, Any]:
        """Without cache; with a mask, as tokenizers give it: compiled without one, it could hold several texts."""
        if self.inputs != "causal":
            return {}
        return {"use_cache": False, "attention_mask": torch.ones_like(self.call()["input_ids"])}

    def _reached(self) -> nn.Module:
        """Builds the model; parameters that its outputs do not depend on, as those of an unused pooler, are frozen."""
        model = self.make()
        outputs(model, **self.call()).sum().backward()
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.grad is not None)
            parameter.grad = None
        return model

    def _earlier(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        tokens = self.call()["input_ids"]
        later = torch.cat([tokens[:, :4], (tokens[:, 4:] + 5) % 45 + 3], 1)
        return outputs(model, input_ids=tokens)[:, :4], outputs(model, input_ids=later)[:, :4]

    def _padded(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        tokens, pairs = self.call()["input_ids"], []
        for side in (slice(0, 3), slice(4, 7)):
            real = torch.ones_like(tokens)
            real[:, side] = 0
            places = {} if self.name.startswith("T5") else {"position_ids": positions(real)}
            padded = outputs(model, input_ids=tokens, attention_mask=real, **places)[real.bool()]
            pairs.append((outputs(model, input_ids=tokens[real.bool()].view(2, -1)).flatten(0, 1), padded))
        return torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])


def outputs(model: nn.Module, **call: Any) -> Tensor:
    """Returns the hidden states or logits of each token, or the boxes of each query."""
    result = model(**call)
    if type(model).__name__ == "SiglipVisionModel" and result.pooler_output is not None:
        return torch.cat([result.last_hidden_state, result.pooler_output[:, None]], 1)
    return result.pred_boxes if "pred_boxes" in result else result[0]


def positions(real: Tensor) -> Tensor:
    """Returns the place of each real token in its text."""
    return (real.cumsum(-1) - 1).clamp(min=0)


class _FrozenBatchNorm(nn.BatchNorm2d):
    """Always as in evaluation, so that training mode gives the same."""

    def train(self, mode: bool = True) -> "_FrozenBatchNorm":
        super().train(False)
        return self


def _sizes(**more: Any) -> Options:
    return {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, **more}


def _image(**more: Any) -> Options:
    return _sizes(image_size=32, patch_size=8, **more)


def _text(**more: Any) -> Options:
    return _sizes(vocab_size=50, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more)


def _siglip(pooled: bool) -> nn.Module:
    return hf.SiglipVisionModel(hf.SiglipVisionConfig(**_image(vision_use_head=pooled)))


def _bert() -> nn.Module:
    return hf.BertModel(hf.BertConfig(**_text(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)))


def _gpt2() -> nn.Module:
    sizes: Options = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 64}
    tokens: Options = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **tokens, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def _llama(key_heads: int) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_text(num_key_value_heads=key_heads)))


def _mistral() -> nn.Module:
    return hf.MistralForCausalLM(hf.MistralConfig(**_text(num_key_value_heads=2, sliding_window=3)))


def _qwen3(key_heads: int, head_dim: int, **more: Any) -> nn.Module:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**_text(num_key_value_heads=key_heads, head_dim=head_dim, **more)))


def _gemma() -> nn.Module:
    return hf.GemmaForCausalLM(hf.GemmaConfig(**_text(num_key_value_heads=1, head_dim=8)))


def _t5() -> nn.Module:
    sizes: Options = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return hf.T5EncoderModel(hf.T5Config(vocab_size=50, dropout_rate=0.0, **sizes))


def _resnet(config: type, stages: list[str]) -> Any:
    sizes: Options = {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 16], "depths": [1, 1, 1, 1]}
    return config(**sizes, layer_type="basic", out_features=stages)


def _detr() -> nn.Module:
    sizes: Options = {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
    }
    heads: Options = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 5, "num_labels": 3}
    backbone = _resnet(hf.ResNetConfig, ["stage4"])
    return hf.DetrForObjectDetection(hf.DetrConfig(backbone_config=backbone, dropout=0.0, **sizes, **heads))


def _rt_detr() -> nn.Module:
    sizes: Options = {"d_model": 32, "encoder_hidden_dim": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    layers: Options = {"encoder_layers": 1, "decoder_layers": 2, "hidden_expansion": 0.5, "num_queries": 8}
    heads: Options = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_labels": 3, "num_denoising": 4}
    maps: Options = {
        "encoder_in_channels": [8, 8, 16],
        "decoder_in_channels": [32, 32, 32],
        "feat_strides": [8, 16, 32],
    }
    backbone = _resnet(hf.RTDetrResNetConfig, ["stage2", "stage3", "stage4"])
    model = hf.RTDetrForObjectDetection(hf.RTDetrConfig(backbone_config=backbone, **sizes, **layers, **heads, **maps))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = _FrozenBatchNorm
    return model


MODELS = [
    Small("ViT", lambda: hf.ViTModel(hf.ViTConfig(**_image())), "images"),
    Small("DeiT", lambda: hf.DeiTModel(hf.DeiTConfig(**_image())), "images"),
    Small("DINOv2", lambda: hf.Dinov2Model(hf.Dinov2Config(**_image())), "images"),
    Small(
        "DINOv2 with registers",
        lambda: hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**_image())),
        "images",
    ),
    Small("CLIP vision", lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**_image())), "images"),
    Small("SigLIP vision", lambda: _siglip(False), "images"),
    Small("DETR", _detr, "images", layers=6),
    Small("RT-DETR", _rt_detr, "images", layers=3, refused=2),
    Small("BERT", _bert, "text"),
    Small("T5 encoder", _t5, "text"),
    Small("GPT-2", _gpt2, "causal"),
    Small("Llama", lambda: _llama(4), "causal"),
    Small("Llama, grouped keys", lambda: _llama(2), "causal"),
    Small("Mistral", _mistral, "causal"),
    Small("Qwen3, 4 x 8", lambda: _qwen3(4, 8), "causal"),
    Small("Qwen3, 4 x 16, grouped keys", lambda: _qwen3(2, 16), "causal"),
    Small("Gemma", _gemma, "causal"),
]
POOLED = Small("SigLIP vision, pooled", lambda: _siglip(True), "images", layers=3)
"""Not in the table: torch computes the weights of its pooling by a softmax, which shows no queries to Linear."""


def subjects() -> list[Subject]:
    """Returns the models for the table of converted models."""
    return [small.subject() for small in MODELS]
