"""Generation with converted models of transformers: the cache gives what no cache gives."""

import copy
import pickle

import pytest
import torch
import transformers as hf
from test_transformers import CAUSAL, NAMES, converted, each, plain
from torch.testing import assert_close
from transformers import DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import DynamicLayer, EncoderDecoderCache

import infvit
from infvit.errors import ConfigError
from infvit.testing.converted_transformers import outputs

LLAMA, MISTRAL = NAMES["Llama, grouped keys"], NAMES["Mistral"]


def prompt() -> dict[str, torch.Tensor]:
    tokens = LLAMA.call()["input_ids"]
    mask = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
    return {"input_ids": tokens * mask, "attention_mask": mask}


def stepwise(model, tokens, sizes, cache=None, **call) -> torch.Tensor:
    """Returns the logits of a text that is given in pieces."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    logits = []
    for piece in tokens.split(sizes, 1):
        logits.append(model(input_ids=piece, cache=cache, use_cache=True, **call).logits)
    return torch.cat(logits, 1)


@torch.no_grad()
@pytest.mark.parametrize("gap", [1, 2, 3])
@pytest.mark.parametrize("name", ["Mistral", "Qwen3, 4 x 8"])
@pytest.mark.parametrize("sizes", [[1] * 12, [3] + [1] * 9, [4, 6, 2]])
def test_padding_that_fills_a_sliding_window_begins_no_text(name, gap, sizes):
    config = NAMES[name].make().config
    config.use_sliding_window, config.sliding_window = True, 3
    if name.startswith("Qwen3"):
        config.layer_types = ["full_attention", "sliding_attention"]
    torch.manual_seed(0)
    model = infvit.convert(NAMES[name].make().__class__(config).double().eval())
    tokens, real = torch.randint(1, 50, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    real[0, 3 : 3 + gap] = 0
    places = (real.cumsum(-1) - 1).clamp(min=0)
    whole = model(input_ids=tokens, attention_mask=real, position_ids=places, use_cache=False).logits
    cache, logits, start = DynamicCache(config=config), [], 0
    for piece in tokens.split(sizes, 1):
        new = slice(start, start := start + piece.shape[1])
        call = {"attention_mask": real[:, : new.stop], "position_ids": places[:, new]}
        logits.append(model(input_ids=piece, cache=cache, use_cache=True, **call).logits)
    assert_close(torch.cat(logits, 1)[real.bool()], whole[real.bool()])


@torch.no_grad()
@each(CAUSAL)
@pytest.mark.parametrize("sizes", [[1] * 7, [3, 1, 1, 2]])
def test_pieces_equal_the_whole(small, sizes):
    model, tokens = converted(small), small.call()["input_ids"]
    assert_close(stepwise(model, tokens, sizes), model(input_ids=tokens, use_cache=False).logits)


def test_bert_as_a_decoder():
    config = NAMES["BERT"].make().config
    config.is_decoder = True
    model = infvit.convert(hf.BertLMHeadModel(config).double().eval())
    assert len(model.conversion_report.converted) == 2
    tokens = NAMES["BERT"].call()["input_ids"]
    with torch.no_grad():
        assert_close(stepwise(model, tokens, [4, 2, 1]), model(input_ids=tokens, use_cache=False).logits)


@each([LLAMA, MISTRAL])
def test_softmax_continues_too(small):
    model, tokens = converted(small, "softmax"), small.call()["input_ids"]
    assert_close(stepwise(model, tokens, [3, 2, 1, 1]), plain(small)(input_ids=tokens).logits)


@each([NAMES["GPT-2"], LLAMA, MISTRAL])
@pytest.mark.parametrize("beams", [1, 3])
def test_generate_with_and_without_cache(small, beams):
    model = converted(small)
    call = {**prompt(), "max_new_tokens": 6, "min_new_tokens": 6, "num_beams": beams, "do_sample": False}
    more = {"return_dict_in_generate": True, "output_scores": True, "num_return_sequences": beams}
    cached, whole = (model.generate(**call, **more, use_cache=use) for use in (True, False))
    assert torch.equal(cached.sequences, whole.sequences)
    assert_close(torch.stack(cached.scores), torch.stack(whole.scores))
    if beams > 1:
        assert_close(cached.sequences_scores, whole.sequences_scores)
        assert (cached.beam_indices[:, 1:6] != cached.beam_indices[:, :1]).any() or small.name != LLAMA.name


def test_prompt_lookup_crops_the_cache():
    model = converted(LLAMA)
    tokens = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    call = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(**call, prompt_lookup_num_tokens=3), model.generate(**call, use_cache=False))


@torch.no_grad()
@each([LLAMA, MISTRAL])
def test_cache_methods(small):
    model, tokens = converted(small), small.call()["input_ids"]
    whole = model(input_ids=tokens, use_cache=False).logits

    def after(change, rest, expected, first=3):
        cache = DynamicCache(config=model.config)
        if small is MISTRAL:
            cache.activate_past_recording()
        stepwise(model, tokens[:, :first], [2, first - 2], cache)
        cache = change(cache) or cache
        assert_close(stepwise(model, rest, [1] * rest.shape[1], cache), expected)

    after(lambda cache: None, tokens[:, 3:], whole[:, 3:])
    after(lambda cache: cache.crop(-2), tokens[:, 3:], whole[:, 3:], first=5)
    after(lambda cache: cache.crop(0), tokens[:, 3:], whole[:, 3:])
    after(lambda cache: cache.reorder_cache(torch.tensor([1, 0])), tokens.flip(0)[:, 3:], whole.flip(0)[:, 3:])
    after(lambda cache: cache.batch_select_indices(torch.tensor([1])), tokens[1:, 3:], whole[1:, 3:])
    twice = tokens.repeat_interleave(2, 0), whole.repeat_interleave(2, 0)
    after(lambda cache: cache.batch_repeat_interleave(2), twice[0][:, 3:], twice[1][:, 3:])
    after(lambda cache: copy.deepcopy(cache), tokens[:, 3:], whole[:, 3:])
    after(lambda cache: pickle.loads(pickle.dumps(cache)), tokens[:, 3:], whole[:, 3:])
    after(lambda cache: cache.reset(), tokens, whole)


def test_a_chunk_of_padding_first():
    model, call = converted(LLAMA), prompt()
    cache, logits = DynamicCache(config=model.config), []
    places = (call["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    for start, stop in ((0, 2), (2, 4), (4, 7)):
        step = {"attention_mask": call["attention_mask"][:, :stop], "position_ids": places[:, start:stop]}
        logits.append(model(input_ids=call["input_ids"][:, start:stop], cache=cache, **step).logits)
    whole = model(**call, position_ids=places, use_cache=False).logits
    real = call["attention_mask"].bool()
    assert_close(torch.cat(logits, 1)[real], whole[real])


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["infsa_pure", "infsa_linear"])
@torch.no_grad()
def test_compile_with_a_cache_without_graph_breaks(mechanism):
    config = LLAMA.make().config
    config.num_hidden_layers = 1
    model = infvit.convert(hf.LlamaForCausalLM(config).double().eval(), mechanism)
    tokens = LLAMA.call()["input_ids"]
    whole = model(input_ids=tokens, use_cache=False).logits
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_close(compiled(tokens).logits, whole)
    if mechanism == "infsa_pure":
        cache = compiled(tokens[:, :5]).cache
        cache.crop(-1)
        assert_close(compiled(tokens[:, 4:], cache=cache).logits, whole[:, 4:])
        assert_close(model(tokens[:, 6:], cache=(cache.crop(-1), cache)[1]).logits, whole[:, 6:])


def test_caches_that_are_not_dynamic_are_refused_by_name():
    model, tokens = converted(LLAMA), LLAMA.call()
    with pytest.raises(ConfigError, match="StaticCache"):
        model(**tokens, cache=StaticCache(config=model.config, max_cache_len=16))
    with pytest.raises(ConfigError, match="StaticCache"):
        model.generate(**tokens, max_new_tokens=2, cache_implementation="static", disable_compile=True)

    class OwnCache(DynamicCache):
        pass

    class OwnLayer(DynamicLayer):
        pass

    own = DynamicCache()
    own.layer_class_to_replicate = OwnLayer
    for cache, name in ((OwnCache(), "OwnCache"), (own, "OwnLayer")):
        with pytest.raises(ConfigError, match=name):
            model(**tokens, cache=cache)
    quantised = object.__new__(QuantizedCache)
    quantised.layers, quantised.offloading, quantised.layer_class_to_replicate = [], False, DynamicLayer
    with pytest.raises(ConfigError, match="QuantizedCache"):
        model(**tokens, cache=quantised)


def test_a_cache_of_softmax_is_refused():
    tokens = LLAMA.call()["input_ids"]
    cache = DynamicCache(config=plain(LLAMA).config)
    plain(LLAMA)(input_ids=tokens[:, :4], cache=cache)
    with pytest.raises(ConfigError, match="4 earlier tokens"):
        converted(LLAMA)(input_ids=tokens[:, 4:], cache=cache)
    cache = DynamicCache(config=plain(LLAMA).config)
    converted(LLAMA)(input_ids=tokens[:, :4], cache=cache)
    handed_on = DynamicCache([(layer.keys, layer.values) for layer in cache.layers])
    with pytest.raises(ConfigError, match="4 earlier tokens"):
        converted(LLAMA)(input_ids=tokens[:, 4:], cache=handed_on)


def test_no_gradient_is_taken_through_a_cache():
    model, tokens = converted(LLAMA), LLAMA.call()["input_ids"]
    model(input_ids=tokens, use_cache=True).logits.sum().backward()
    model.zero_grad()
    logits = stepwise(model, tokens, [4, 3])
    with pytest.raises(ConfigError, match="whole sequences"):
        logits.sum().backward()


def test_linear_keeps_no_state():
    model, tokens = converted(LLAMA, "infsa_linear"), LLAMA.call()
    with pytest.raises(ConfigError, match=r"infsa_linear keeps no state.*use_cache=False"):
        model.generate(**tokens, max_new_tokens=3)
    longer = model.generate(**tokens, max_new_tokens=3, use_cache=False)
    assert longer.shape == (2, 10)


def test_a_half_of_softmax_generates_the_same_with_its_cache():
    half = infvit.convert(plain(LLAMA), include="layers.1")
    call = {**prompt(), "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    cached, whole = (half.generate(**call, use_cache=use, output_scores=True) for use in (True, False))
    assert_close(torch.stack(cached.scores), torch.stack(whole.scores))


def test_encoder_decoder_cache_serves_the_decoder_alone():
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    model, tokens = converted(NAMES["GPT-2"]), NAMES["GPT-2"].call()["input_ids"]
    whole = outputs(model, input_ids=tokens, use_cache=False)
    assert_close(stepwise(model, tokens, [4, 1, 2], cache), whole)


def test_t5_generates_with_its_encoder_decoder_cache():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    model = infvit.convert(hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=50, **sizes, **tokens)).double().eval())
    call = {**prompt(), "max_new_tokens": 5, "min_new_tokens": 5, "num_beams": 2, "do_sample": False}
    more = {"return_dict_in_generate": True, "output_scores": True}
    cached, whole = (model.generate(**call, **more, use_cache=use) for use in (True, False))
    assert torch.equal(cached.sequences, whole.sequences)
    assert_close(torch.stack(cached.scores), torch.stack(whole.scores))
