"""One small model of each family of timm, and a second one of families that are several."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import timm
from torch import nn

from . import Architecture, images

#: Image sizes and arguments of groups of models.
_GROUPS: list[tuple[tuple[int, ...], dict[str, Any], str]] = [
    # Any size.
    ((64, 96, 72), {}, """
        caformer_s18 convformer_s18 convmixer_768_32 convnext_atto convnextv2_atto cpubone_nano
        cs3darknet_focus_s csatv2 cspnext_tiny cspresnet50 darknet53 davit_tiny densenet121 dm_nfnet_f0 dpn48b
        ecaresnet26t edgenext_xx_small efficientvim_m1 efficientvit_b0 ese_vovnet19b_slim_dw fasternet_t0 fastvit_t8
        fbnetc_100 focalnet_tiny_srf gernet_s ghostnet_050 hardcorenas_b hgnetv2_b0 iformer_t inception_next_atto
        lcnet_050 lcnetv2_small legacy_seresnet18 legacy_xception lowformer_b0 mambaout_femto
        mixnet_s mnasnet_small mobilenetv2_035 mobilenetv3_small_050 mobilenetv4_conv_small mobilenetv4_hybrid_medium
        mobilenetv5_base mobileone_s0 nasnetalarge nextvit_small nf_regnet_b0 nf_resnet26 pnasnet5large poolformer_s12
        poolformerv2_s12 pvt_v2_b0 rdnet_tiny regnetx_002 repghostnet_050 repvgg_a0 res2next50 resnest14d resnet10t
        resnetv2_18 resnetv2_50x1_bit rexnet_100 selecsls42 seresnext26d_32x4d shvit_s1 skresnet18 starnet_s050
        tf_efficientnet_lite0 tf_efficientnetv2_b0 tiny_vit_5m_224 tinynet_e tresnet_m vgg11 xception41p
    """),
    # Any size that is large enough and a multiple of 32.
    ((96, 128, 160), {}, """
        dla34 dla46x_c hrnet_w18_small inception_resnet_v2 inception_v3 inception_v4 sam2_hiera_tiny
    """),
    # The size that the model is built for, here a small one.
    ((64,), {"img_size": 64}, """
        beit_base_patch16_224 beitv2_base_patch16_224 cait_xxs24_224 coat_tiny coatnet_pico_rw_224 convit_tiny
        deit3_small_patch16_224 deit_tiny_patch16_224 efficientformerv2_s0 efficientvit_m0 eva02_tiny_patch14_224
        flexivit_small gcvit_xxtiny gemma4_vit_167m gmlp_ti16_224 hiera_tiny_224 levit_128s maxvit_pico_rw_256
        mixer_s32_224 mobilevit_xxs mobilevitv2_050 mvitv2_tiny naflexvit_base_patch16_parfac_gap nest_tiny pit_ti_224
        qwen3_vit_88m repvit_m1 resmlp_12_224 samvit_base_patch16_224 sequencer2d_s swiftformer_xs
        swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 swinv2_tiny_window16_256 tnt_s_legacy_patch16_224
        twins_svt_small visformer_tiny vit_relpos_small_patch16_224 vit_tiny_patch16_224
        vit_tiny_r_s16_p8_224 vitamin_small_224 volo_d1_224 xcit_nano_12_p8_224
    """),
    # The size that the model is built for, which cannot be made smaller.
    ((224,), {}, "deepseek_vit_412m efficientformer_l1"),
    ((240,), {}, "crossvit_tiny_240"),
    ((256,), {}, "bat_resnext26ts botnet26t_256 halonet_h1 lambda_resnet26t"),
]  # fmt: skip


def every() -> Iterator[Architecture]:
    for sizes, arguments, names in _GROUPS:
        for name in names.split():
            yield Architecture("timm", name, functools.partial(_make, name, arguments), images(*sizes))


def _make(name: str, arguments: dict[str, Any]) -> nn.Module:
    return timm.create_model(name, **arguments)
