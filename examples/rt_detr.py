"""RT-DETR with Pure InfSA: a forward pass, and what was converted and what was not.

    pip install 'infvit[hf]'; python examples/rt_detr.py [--weights PekingU/rtdetr_r18vd]

Without --weights the model is a small one of random weights, which needs no network. The encoder's self-attention and
the decoder's are converted; the deformable cross-attention, which samples the image at learned places, is refused by
name and stays as it is.
"""

import argparse
from collections.abc import Sequence

import torch
from transformers import RTDetrConfig, RTDetrForObjectDetection, RTDetrResNetConfig

import infvit
from infvit.convert import ConversionReport


def build() -> RTDetrForObjectDetection:
    """Returns a small RT-DETR of random weights."""
    backbone = RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 32, 64], depths=[1, 1, 1, 1], out_features=["stage2", "stage3", "stage4"]
    )
    config = RTDetrConfig(
        backbone_config=backbone, encoder_hidden_dim=32, encoder_in_channels=[16, 32, 64], d_model=32, num_queries=20,
        encoder_ffn_dim=32, decoder_ffn_dim=32, decoder_layers=2, decoder_in_channels=[32, 32, 32], num_labels=5,
        encoder_attention_heads=4, decoder_attention_heads=4, num_denoising=0,
    )  # fmt: skip
    return RTDetrForObjectDetection(config)


def main(arguments: Sequence[str] | None = None) -> ConversionReport:
    """Converts the model, runs it, and returns the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", help="a published model, fetched from the Hugging Face hub")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = RTDetrForObjectDetection.from_pretrained(given.weights) if given.weights else build()
    model = infvit.convert(model.eval(), "infsa_pure")
    report: ConversionReport = model.conversion_report
    print(report)
    with torch.no_grad():
        out = model(torch.randn(1, 3, 64, 64))
    print(f"boxes {tuple(out.pred_boxes.shape)}, class scores {tuple(out.logits.shape)}")
    assert out.pred_boxes.isfinite().all()
    return report


if __name__ == "__main__":
    main()
