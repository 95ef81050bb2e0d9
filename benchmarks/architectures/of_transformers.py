"""Small configurations of transformers: text, vision, audio and several at once, mixtures of experts, state spaces."""

# ruff: noqa: C408 (configurations read as the calls that they become)

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from . import BATCHES, Architecture

os.environ.setdefault("HF_HUB_OFFLINE", "1")

_VOCABULARY = 96
_LENGTHS = (12, 20, 16)
_SIZES = (32, 64, 48)
_SAMPLES = (2000, 3000, 2400)
#: Names that most configurations share.
_COMMON = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
_TEXT = dict(_COMMON, vocab_size=_VOCABULARY, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
             eos_token_id=2)  # fmt: skip
_GROUPED = dict(_TEXT, num_key_value_heads=2, head_dim=8)
_EXPERTS = dict(_GROUPED, num_local_experts=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_BOTH = dict(vocab_size=_VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
             decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
             pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2)  # fmt: skip
_T5 = dict(vocab_size=_VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, pad_token_id=0,
           decoder_start_token_id=0)  # fmt: skip
_STATE = dict(vocab_size=_VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8, pad_token_id=0)
_IMAGE = dict(_COMMON, image_size=32, patch_size=8)
_SPEECH = dict(_COMMON, vocab_size=_VOCABULARY, conv_dim=(16, 16, 16), conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3),
               num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, pad_token_id=0, bos_token_id=1,
               eos_token_id=2, mask_time_prob=0.0)  # fmt: skip
_STAGES = dict(hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1])


def _ids(number: int) -> Tensor:
    return torch.randint(3, _VOCABULARY, (BATCHES[number], _LENGTHS[number]))


def _text(number: int) -> dict[str, Tensor]:
    ids = _ids(number)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _both(number: int) -> dict[str, Tensor]:
    return {**_text(number), "decoder_input_ids": _ids(number)}


def _pixels(number: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCHES[number], 3, _SIZES[number], _SIZES[number])}


def _fixed_pixels(number: int, size: int = 32) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCHES[number], 3, size, size)}


def _large_pixels(number: int) -> dict[str, Tensor]:
    size = (64, 96, 128)[number]
    return {"pixel_values": torch.randn(BATCHES[number], 3, size, size)}


def _samples(number: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(BATCHES[number], _SAMPLES[number])}


def _image_and_text(number: int) -> dict[str, Tensor]:
    return {**_text(number), **_fixed_pixels(number)}


def _whisper(number: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(BATCHES[number], 16, 64), "decoder_input_ids": _ids(number)}


def _spectrum_frames(number: int) -> dict[str, Tensor]:
    length = (40, 60, 48)[number]
    return {
        "input_features": torch.randn(BATCHES[number], length, 16),
        "attention_mask": torch.ones(BATCHES[number], length, dtype=torch.long),
        "decoder_input_ids": _ids(number),
    }


def _series(number: int) -> dict[str, Tensor]:
    return {"past_values": torch.randn(BATCHES[number], 32, 3)}


def _film(number: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCHES[number], 4, 3, 32, 32)}


#: Name -> inputs, configuration and, where it is not AutoModel, the class that makes a model from a configuration.
_MODELS: dict[str, tuple[Callable[[int], Any], dict[str, Any]] | tuple[Callable[[int], Any], dict[str, Any], str]] = {
    # Text, encoders.
    "bert": (_text, _TEXT, "AutoModelForSequenceClassification"),
    "roberta": (_text, _TEXT, "AutoModelForMaskedLM"),
    "albert": (_text, dict(_TEXT, embedding_size=16)),
    "distilbert": (_text, dict(_TEXT, dim=32, n_layers=2, n_heads=4, hidden_dim=64)),
    "electra": (_text, dict(_TEXT, embedding_size=16)),
    "deberta": (_text, dict(_TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"])),
    "deberta-v2": (_text, dict(_TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=16)),
    "mpnet": (_text, _TEXT),
    "funnel": (_text, dict(vocab_size=_VOCABULARY, block_sizes=[1, 1], block_repeats=[1, 1], num_decoder_layers=1,
                           d_model=32, n_head=4, d_head=8, d_inner=64), "FunnelModel"),
    "longformer": (_text, dict(_TEXT, attention_window=8)),
    "big_bird": (_text, dict(_TEXT, attention_type="original_full")),
    "roformer": (_text, _TEXT),
    "squeezebert": (_text, dict(_TEXT, embedding_size=32)),
    "mobilebert": (_text, dict(_TEXT, embedding_size=16, intra_bottleneck_size=32)),
    "xlm": (_text, dict(n_words=_VOCABULARY, emb_dim=32, n_layers=2, n_heads=4, pad_index=0)),
    "xlnet": (_text, dict(vocab_size=_VOCABULARY, d_model=32, n_layer=2, n_head=4, d_inner=64)),
    "convbert": (_text, dict(_TEXT, embedding_size=32, conv_kernel_size=3)),
    "nystromformer": (_text, dict(_TEXT, num_landmarks=64, segment_means_seq_len=64)),
    "fnet": (lambda n: {"input_ids": _ids(n)}, _TEXT),
    "megatron-bert": (_text, _TEXT),
    "modernbert": (_text, dict(_TEXT, cls_token_id=1, sep_token_id=2)),
    "rembert": (_text, dict(_TEXT, input_embedding_size=16, output_embedding_size=16)),
    "layoutlm": (_text, _TEXT),
    "esm": (_text, dict(_TEXT, position_embedding_type="rotary", mask_token_id=3, token_dropout=False)),
    "canine": (_text, dict(_TEXT, num_hash_buckets=64, local_transformer_stride=8)),
    "perceiver": (_text, dict(vocab_size=_VOCABULARY, num_latents=8, d_latents=32, d_model=32, num_blocks=1,
                              num_self_attends_per_block=2, num_self_attention_heads=4, num_cross_attention_heads=4,
                              max_position_embeddings=64), "PerceiverForMaskedLM"),
    # Text, decoders.
    "gpt2": (_text, dict(_TEXT, n_positions=64), "AutoModelForCausalLM"),
    "gpt_neo": (_text, dict(_TEXT, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
                            window_size=8)),
    "gpt_neox": (_text, _TEXT),
    "gptj": (_text, dict(_TEXT, n_positions=64, rotary_dim=4)),
    "opt": (_text, dict(_TEXT, ffn_dim=64, word_embed_proj_dim=32)),
    "bloom": (_text, _TEXT),
    "codegen": (_text, dict(_TEXT, n_positions=64, rotary_dim=4)),
    "biogpt": (_text, _TEXT),
    "xglm": (_text, dict(_TEXT, d_model=32, num_layers=2, attention_heads=4, ffn_dim=64)),
    "ctrl": (_text, dict(_TEXT, n_positions=64, dff=64)),
    "mpt": (_text, dict(vocab_size=_VOCABULARY, d_model=32, n_heads=4, n_layers=2, max_seq_len=64)),
    "falcon": (_text, _TEXT),
    "llama": (_text, _GROUPED, "AutoModelForCausalLM"),
    "mistral": (_text, dict(_GROUPED, sliding_window=8)),
    "gemma": (_text, _GROUPED),
    "gemma2": (_text, dict(_GROUPED, sliding_window=8)),
    "gemma3_text": (_text, dict(_GROUPED, sliding_window=8)),
    "qwen2": (_text, _GROUPED),
    "qwen3": (_text, _GROUPED),
    "phi": (_text, _TEXT),
    "phi3": (_text, _GROUPED),
    "stablelm": (_text, _GROUPED),
    "starcoder2": (_text, _GROUPED),
    "olmo2": (_text, _GROUPED),
    "cohere": (_text, _GROUPED),
    "persimmon": (_text, _TEXT),
    "granite": (_text, _GROUPED),
    "smollm3": (_text, _GROUPED),
    "glm4": (_text, _GROUPED),
    "nemotron": (_text, _GROUPED),
    # Mixtures of experts.
    "mixtral": (_text, _EXPERTS, "AutoModelForCausalLM"),
    "qwen2_moe": (_text, dict(_EXPERTS, shared_expert_intermediate_size=32)),
    "qwen3_moe": (_text, _EXPERTS),
    "olmoe": (_text, _EXPERTS),
    "granitemoe": (_text, _EXPERTS),
    "deepseek_v3": (_text, dict(_EXPERTS, n_routed_experts=4, n_group=1, topk_group=1, num_key_value_heads=4,
                                kv_lora_rank=8, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
                                first_k_dense_replace=1)),
    "gpt_oss": (_text, dict(_EXPERTS, sliding_window=8)),
    "switch_transformers": (_both, dict(_T5, num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
                                        expert_capacity=32)),
    # State spaces and other recurrences.
    "mamba": (_text, _STATE),
    "mamba2": (_text, dict(_STATE, num_heads=8, head_dim=8, n_groups=2, chunk_size=8)),
    "falcon_mamba": (_text, _STATE),
    "jamba": (_text, dict(_EXPERTS, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
                          expert_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False)),
    "bamba": (_text, dict(_GROUPED, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8,
                          mamba_chunk_size=8)),
    "recurrent_gemma": (_text, dict(_GROUPED, lru_width=32, attention_window_size=16, num_hidden_layers=3,
                                    block_types=["recurrent", "recurrent", "attention"])),
    "rwkv": (lambda n: {"input_ids": _ids(n)}, dict(vocab_size=_VOCABULARY, hidden_size=32, num_hidden_layers=2,
                                                    attention_hidden_size=32, context_length=64)),
    "xlstm": (_text, dict(vocab_size=_VOCABULARY, hidden_size=32, num_heads=4, num_hidden_layers=2, chunk_size=8)),
    # Text, encoder-decoders.
    "t5": (_both, _T5, "AutoModelForSeq2SeqLM"),
    "mt5": (_both, _T5),
    "umt5": (_both, _T5),
    "longt5": (_both, dict(_T5, local_radius=4)),
    "bart": (_both, _BOTH, "AutoModelForSeq2SeqLM"),
    "mbart": (_both, _BOTH),
    "pegasus": (_both, _BOTH),
    "blenderbot": (_both, _BOTH),
    "marian": (_both, _BOTH),
    "m2m_100": (_both, _BOTH),
    "led": (_both, dict(_BOTH, attention_window=8, max_encoder_position_embeddings=64,
                        max_decoder_position_embeddings=64)),
    # Vision.
    "vit": (_fixed_pixels, _IMAGE, "AutoModelForImageClassification"),
    "deit": (_fixed_pixels, _IMAGE),
    "beit": (_fixed_pixels, dict(_IMAGE, vocab_size=_VOCABULARY, use_relative_position_bias=True)),
    "dinov2": (_pixels, _IMAGE),
    "dinov3_vit": (_pixels, _IMAGE),
    "ijepa": (_fixed_pixels, _IMAGE),
    "yolos": (_fixed_pixels, dict(_IMAGE, image_size=[32, 32])),
    "swin": (_pixels, dict(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)),
    "swinv2": (_pixels, dict(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
                             window_size=4)),
    "hiera": (_fixed_pixels, dict(image_size=[32, 32], patch_size=[7, 7], patch_stride=[4, 4], patch_padding=[3, 3],
                                  embed_dim=16, depths=[1, 1], num_heads=[1, 2], query_stride=[2, 2], num_query_pool=1,
                                  masked_unit_size=[4, 4])),
    "convnext": (_pixels, _STAGES),
    "convnextv2": (_pixels, _STAGES),
    "resnet": (_pixels, dict(_STAGES, embedding_size=16)),
    "regnet": (_pixels, dict(_STAGES, embedding_size=16, groups_width=8)),
    "bit": (_pixels, dict(_STAGES, embedding_size=16, num_groups=8)),
    "mobilenet_v1": (_pixels, dict(depth_multiplier=0.25, min_depth=8)),
    "mobilenet_v2": (_pixels, dict(depth_multiplier=0.25)),
    "mobilevit": (_large_pixels, dict(image_size=64, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24,
                                                                                                    32, 64])),
    "mobilevitv2": (_large_pixels, dict(image_size=64, width_multiplier=0.5)),
    "segformer": (_pixels, dict(_STAGES, num_attention_heads=[1, 2, 4, 4], decoder_hidden_size=32),
                  "AutoModelForSemanticSegmentation"),
    "poolformer": (_large_pixels, _STAGES),
    "pvt": (_fixed_pixels, dict(_STAGES, image_size=32, num_attention_heads=[1, 2, 4, 4])),
    "pvt_v2": (_pixels, dict(_STAGES, image_size=32, num_attention_heads=[1, 2, 4, 4])),
    "glpn": (_large_pixels, dict(_STAGES, num_attention_heads=[1, 2, 4, 4], decoder_hidden_size=16),
             "AutoModelForDepthEstimation"),
    "levit": (lambda n: _fixed_pixels(n, 64), dict(image_size=64, hidden_sizes=[16, 32, 48], depths=[1, 1, 1],
                                                   num_attention_heads=[2, 4, 6], key_dim=[8, 8, 8])),
    "efficientnet": (_pixels, dict(width_coefficient=0.25, depth_coefficient=0.5, image_size=64, hidden_dim=320)),
    "focalnet": (_pixels, dict(image_size=32, embed_dim=16, hidden_sizes=[16, 32], depths=[1, 1], focal_levels=[2, 2],
                               focal_windows=[3, 3])),
    "swiftformer": (_large_pixels, dict(depths=[1, 1, 1, 1], embed_dims=[16, 24, 32, 48])),
    "dpt": (_fixed_pixels, dict(_IMAGE, num_hidden_layers=4, backbone_out_indices=[0, 1, 2, 3],
                                neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16, is_hybrid=False),
            "AutoModelForDepthEstimation"),
    "sam_vision_model": (_fixed_pixels, dict(_IMAGE, mlp_dim=64, output_channels=16, global_attn_indexes=[1],
                                             window_size=2)),
    "timesformer": (_film, dict(_IMAGE, num_frames=4)),
    "videomae": (_film, dict(_IMAGE, num_frames=4, tubelet_size=2)),
    "vivit": (_film, dict(_IMAGE, num_frames=4, tubelet_size=[2, 8, 8])),
    # Audio.
    "wav2vec2": (_samples, _SPEECH),
    "hubert": (_samples, _SPEECH),
    "wavlm": (_samples, _SPEECH),
    "unispeech": (_samples, _SPEECH),
    "data2vec-audio": (_samples, dict(_SPEECH, num_conv_pos_embeddings=2)),
    "sew": (_samples, dict(_SPEECH, squeeze_factor=2)),
    "wav2vec2-conformer": (_samples, _SPEECH),
    "audio-spectrogram-transformer": (lambda n: {"input_values": torch.randn(BATCHES[n], 48, 16)},
                                      dict(_COMMON, patch_size=4, max_length=48, num_mel_bins=16)),
    "whisper": (_whisper, dict(_BOTH, num_mel_bins=16, max_source_positions=32, max_target_positions=32)),
    "speech_to_text": (_spectrum_frames, dict(_BOTH, input_feat_per_channel=16, conv_channels=32,
                                              max_source_positions=64, max_target_positions=64)),
    "encodec": (lambda n: {"input_values": torch.randn(BATCHES[n], 1, _SAMPLES[n])},
                dict(hidden_size=16, num_filters=4, upsampling_ratios=[4, 4], codebook_size=32, codebook_dim=16)),
    # Several kinds of input.
    "clip": (_image_and_text, dict(projection_dim=16, text_config=dict(_TEXT), vision_config=dict(_IMAGE))),
    "siglip": (_image_and_text, dict(text_config=dict(_TEXT), vision_config=dict(_IMAGE))),
    "blip": (_image_and_text, dict(projection_dim=16, text_config=dict(_TEXT, encoder_hidden_size=32),
                                   vision_config=dict(_IMAGE))),
    "vilt": (_image_and_text, dict(_TEXT, image_size=32, patch_size=8, num_images=1)),
    # Series.
    "patchtst": (_series, dict(num_input_channels=3, context_length=32, patch_length=8, patch_stride=8, d_model=32,
                               num_hidden_layers=2, num_attention_heads=4, ffn_dim=64)),
    "patchtsmixer": (_series, dict(num_input_channels=3, context_length=32, patch_length=8, patch_stride=8, d_model=16,
                                   num_layers=2)),
}  # fmt: skip


def every() -> Iterator[Architecture]:
    for name, (item, config, *kind) in _MODELS.items():
        made = functools.partial(_make, name, config, kind[0] if kind else "AutoModel")
        yield Architecture("transformers", name, made, item)


def _make(name: str, config: dict[str, Any], kind: str) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    made = transformers.AutoConfig.for_model(name, **config)
    made.initializer_range = 0.15  # the usual 0.02 is meant for models a thousand wide
    made.use_cache = False  # a cache is an object of its own class, which no graph returns
    if kind.startswith("Auto"):
        return getattr(transformers, kind).from_config(made)
    return getattr(transformers, kind)(made)
