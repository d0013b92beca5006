"""Completions against transformers' `generate`, against decoding without a cache, and against themselves alone."""

import copy
import json
import re

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given
from hypothesis import strategies as st

from kenotron.config.errors import InputError
from kenotron.generation import SamplingOptions, generate
from kenotron.generation.decode import ends_of_text
from kenotron.generation.kv_cache import KVCache
from kenotron.generation.load import load_for_generation
from kenotron.generation.text import UNFINISHED
from kenotron.interop import to_hf
from kenotron.kernels.attentions.masked import eager
from kenotron.models import Context
from kenotron.models.foreign_model import ForeignModel
from kenotron.text.tokenizer import load_tokenizer
from support.checkpoint_states import flip_a_byte
from support.tiny_llamas import VARIANTS, load_hf, our_logits, our_model, random_tokens, save_ours, small_tokenizer

NEW = 12
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}  # for transformers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.fixture(scope="module")
def model(folder):
    return our_model(folder)


@pytest.fixture(scope="module")
def in_float64(model):
    return copy.deepcopy(model).double()


def prompts_of(lengths, seed=0):
    return [random_tokens(1, length, seed + number)[0].tolist() for number, length in enumerate(lengths)]


@pytest.mark.cases(6)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_output_is_that_of_transformers_on_the_exported_model(variant, interleaved, tmp_path):
    changes = VARIANTS[variant] | {"rope_interleaved": interleaved}
    path = save_ours(our_model(tmp_path, **changes), tmp_path / "checkpoints", **changes)
    to_hf(path, tmp_path / "hf")
    theirs = load_hf(tmp_path / "hf")
    prompts = prompts_of([9, 1, 14])  # `dynamic` grows past its 16 positions while it decodes
    ours, options = load_for_generation(path).model, SamplingOptions(max_new_tokens=NEW, stop_at_eos=False)
    for prompt, completion in zip(prompts, generate(ours, None, prompts, options)):
        options = GREEDY | {"use_cache": variant != "dynamic"}
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=NEW, **options)
        assert completion.tokens == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("penalty", [1.3, pytest.param(0.7, marks=pytest.mark.slow)])
def test_penalty_and_log_probabilities_are_those_of_transformers(penalty, folder, model, tmp_path):
    to_hf(save_ours(model, tmp_path / "checkpoints"), tmp_path / "hf")
    theirs = load_hf(tmp_path / "hf")
    prompts = prompts_of([9, 1, 14])
    options = SamplingOptions(max_new_tokens=NEW, stop_at_eos=False, repetition_penalty=penalty, logprobs=True)
    plain = generate(model, None, prompts, SamplingOptions(max_new_tokens=NEW, stop_at_eos=False))
    found = generate(model, None, prompts, options)
    assert [one.tokens for one in found] != [one.tokens for one in plain]
    for prompt, completion in zip(prompts, found):
        more = GREEDY | {"repetition_penalty": penalty, "return_dict_in_generate": True, "output_logits": True}
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=NEW, **more)
        assert completion.tokens == expected.sequences[0, len(prompt) :].tolist()
        scores = theirs.compute_transition_scores(expected.sequences, expected.logits, normalize_logits=True)
        assert torch.allclose(torch.tensor(completion.logprobs), scores[0], atol=1e-4)


def test_log_probabilities_come_for_the_tokens_that_were_drawn(model):
    prompts = prompts_of([5, 8])
    options = SamplingOptions(max_new_tokens=4, temperature=1.5, top_k=9, logprobs=True)
    for prompt, completion in zip(prompts, generate(model, None, prompts, options, batch_size=1)):
        text = torch.tensor([prompt + completion.tokens])
        exact = our_logits(model, text)[0].double().log_softmax(-1)
        expected = [float(exact[len(prompt) - 1 + place, token]) for place, token in enumerate(completion.tokens)]
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)
    assert generate(model, None, prompts, SamplingOptions(max_new_tokens=2))[0].logprobs is None


def ends_whole(run, texts):
    """Whether the first of `texts` with `run` in it, each a token longer, ends with a whole character."""
    return not next(text for text in texts if run in text).endswith(UNFINISHED)


def test_a_stop_string_ends_the_text_where_it_ends_transformers(model, tokenizer, tmp_path):
    from transformers import AutoTokenizer

    to_hf(save_ours(model, tmp_path / "checkpoints", tokenizer), tmp_path / "hf")
    theirs, their_tokenizer = load_hf(tmp_path / "hf"), AutoTokenizer.from_pretrained(tmp_path / "hf")
    stopped = 0
    for number, prompt in enumerate(prompts_of([3, 6, 9, 12], seed=7)):
        [whole] = generate(model, tokenizer, [prompt], SamplingOptions(max_new_tokens=16, stop_at_eos=False))
        # Half of a character at the end of a token, as in "na\xc3", holds our text back for one token more.
        texts = [tokenizer.decode(whole.tokens[:end]) for end in range(17)]
        clear = [run for run in re.findall(f"[a-z]{{{1 + number % 3}}}", whole.text) if ends_whole(run, texts)]
        stops = [clear[len(clear) // 2], "never there"]
        options, pieces = SamplingOptions(max_new_tokens=16, stop_at_eos=False, stop=stops), []
        [found] = generate(model, tokenizer, [prompt], options, stream=lambda _, piece, to=pieces: to.append(piece))
        more = GREEDY | {"stop_strings": stops, "tokenizer": their_tokenizer}
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=16, **more)
        assert found.tokens == expected[0, len(prompt) :].tolist()
        assert found.text == whole.text[: whole.text.index(stops[0])] == "".join(pieces)
        assert found.stopped_by == "stop"
        stopped += len(found.tokens) < 16
    assert stopped > 1


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=4),
    st.sampled_from([0.0, 1.0]),
    st.integers(1, 4),
    st.integers(0, 1000),
)
def test_a_batch_gives_every_prompt_what_it_gets_alone(model, in_float64, lengths, temperature, batch_size, seed):
    prompts = prompts_of(lengths, seed)
    model = in_float64 if temperature else model  # a batch rounds differently, which may draw a neighbouring token
    options = SamplingOptions(max_new_tokens=NEW, temperature=temperature, seed=seed)
    alone = generate(model, None, prompts, options, batch_size=1)
    assert generate(model, None, prompts, options, batch_size=batch_size) == alone


def test_a_row_that_ends_leaves_the_others_as_they_were(model, monkeypatch):
    """Rows of one batch end at different steps, and those that go on give the same tokens."""
    prompts = prompts_of([5, 3, 8, 6])
    free = generate(model, None, prompts, SamplingOptions(max_new_tokens=NEW, stop_at_eos=False))
    eos = free[1].tokens[4]
    monkeypatch.setattr(model, "config", model.config.model_copy(update={"eos_token_id": eos}))
    stopped = generate(model, None, prompts, SamplingOptions(max_new_tokens=NEW))
    for before, after in zip(free, stopped):
        expected = before.tokens[: before.tokens.index(eos) + 1] if eos in before.tokens else before.tokens
        assert after.tokens == expected
        assert after.stopped_by == ("eos" if eos in before.tokens else "max_new_tokens")
    assert {len(completion.tokens) for completion in stopped} != {NEW}


@pytest.mark.parametrize("kind", ["Llama", "Gemma", "Phi3"])
def test_where_angles_follow_the_length_every_token_is_that_of_transformers_on_the_whole_text(kind, tmp_path):
    """Without a cache, whose keys would keep the angles of a shorter text; built in, and as transformers' own model."""
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    keys = {"max_position_embeddings": 16, "rope_parameters": scaling}
    if kind == "Gemma":  # not built in
        keys |= {"head_dim": 8, "pad_token_id": 0}
    if kind == "Phi3":
        factors = {"short_factor": [1.0] * 4, "long_factor": [3.0, 4.0, 5.0, 6.0]}
        scaling = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16} | factors
        keys = {"max_position_embeddings": 64, "original_max_position_embeddings": 16, "rope_parameters": scaling}
        keys |= {"pad_token_id": 0}
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.4}
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads, **keys)
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    theirs.save_pretrained(tmp_path / "hf")
    model = load_for_generation(str(tmp_path / "hf")).model
    assert isinstance(model, ForeignModel) == (kind != "Llama")
    prompts = [[token % 64 for token in prompt] for prompt in prompts_of([12, 3, 20])]
    options = SamplingOptions(max_new_tokens=10, stop_at_eos=False, logprobs=True)
    for prompt, completion in zip(prompts, generate(model, None, prompts, options)):
        text = list(prompt)
        for token, logprob in zip(completion.tokens, completion.logprobs, strict=True):
            fresh = copy.deepcopy(theirs)  # its rotary module remembers lengths
            with torch.no_grad():
                scores = fresh(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].log_softmax(-1)
            assert token == int(scores.argmax())
            assert logprob == pytest.approx(float(scores[token]), abs=1e-4)
            text.append(token)


def test_end_of_text_is_the_tokenizers_and_is_not_shown(model, tokenizer, monkeypatch):
    prompts = ["def main"]
    [free] = generate(model, tokenizer, prompts, SamplingOptions(max_new_tokens=NEW, stop_at_eos=False))
    monkeypatch.setattr(tokenizer, "eos_token_id", free.tokens[3])
    [stopped] = generate(model, tokenizer, prompts, SamplingOptions(max_new_tokens=NEW))
    length = free.tokens.index(free.tokens[3]) + 1
    assert stopped.tokens == free.tokens[:length]
    assert stopped.stopped_by == "eos"
    assert stopped.text == tokenizer.decode(free.tokens[: length - 1])


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_each_end_of_text_that_the_models_files_name_stops(model, tokenizer, tmp_path, file):
    """As transformers stops: a Llama of Meta's names three."""
    prompts = ["def main"]
    [free] = generate(model, tokenizer, prompts, SamplingOptions(max_new_tokens=NEW, stop_at_eos=False))
    tokenizer.save(tmp_path)
    for named, end in (([290, free.tokens[3]], free.tokens[3]), (free.tokens[2], free.tokens[2])):
        (tmp_path / file).write_text(json.dumps({"eos_token_id": named}))
        [stopped] = generate(model, load_tokenizer(tmp_path), prompts, SamplingOptions(max_new_tokens=NEW))
        assert stopped.tokens == free.tokens[: free.tokens.index(end) + 1]
        assert stopped.stopped_by == "eos"
        assert stopped.text == tokenizer.decode(stopped.tokens[:-1])
    for broken in ("no JSON", '{"eos_token_id": null}', "[]"):
        (tmp_path / file).write_text(broken)
        assert ends_of_text(load_tokenizer(tmp_path), model.config) == {0}


def test_softcapped_scores_are_the_same_with_and_without_a_cache():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 9, 8, generator=generator) * 3 for heads in (4, 2, 2))
    for window in (None, 3):
        cache = KVCache(rows=1, capacity=9)
        ctx = cache.prefill([6])
        prompt = tuple(each[:, :, :6] for each in (q, k, v))
        outputs = [cache(*prompt, ctx, 0, window=window, softcap=2.0)]
        for position in range(6, 9):
            ctx = cache.step([position])
            new = tuple(each[:, :, position : position + 1] for each in (q, k, v))
            outputs.append(cache(*new, ctx, 0, window=window, softcap=2.0))
        whole = Context((1, 9), torch.arange(9), eager)
        expected = eager(q, k, v, whole, 0, None, window, 2.0)
        assert torch.allclose(torch.cat(outputs, 2), expected, atol=1e-5)
        assert not torch.allclose(expected, eager(q, k, v, whole, 0, None, window), atol=0.1)


def test_a_text_stops_where_the_positions_end(model):
    limit = model.config.max_position_embeddings
    [prompt] = prompts_of([limit - 5])
    [completion] = generate(model, None, [prompt], SamplingOptions(max_new_tokens=50, stop_at_eos=False))
    assert (len(completion.tokens), completion.stopped_by) == (5, "max_position_embeddings")
    [exact] = generate(model, None, [prompt], SamplingOptions(max_new_tokens=5, stop_at_eos=False))
    assert (exact.tokens, exact.stopped_by) == (completion.tokens, "max_new_tokens")


def test_a_prompt_that_fills_all_positions_is_an_error_with_both_lengths(model):
    with pytest.raises(InputError, match=r"^prompt 2: 64 tokens leave no room .* at most 64 \(max_position_embeddings"):
        generate(model, None, [[1], prompts_of([64])[0]])


def test_an_empty_prompt_starts_a_text(model, tokenizer):
    [empty] = generate(model, tokenizer, [""], SamplingOptions(max_new_tokens=NEW))
    [started] = generate(model, tokenizer, [[tokenizer.eos_token_id]], SamplingOptions(max_new_tokens=NEW))
    assert empty.tokens == started.tokens


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([1, 300], {}, "prompt 1: token 300 is outside the model's vocabulary of 300"),
        ("text", {}, "prompt 1: there is no tokenizer here"),
        (b"text", {}, "prompt 1: expected a text or a list of token ids, found b'text'"),
        ([1], {"batch_size": 0}, "batch_size: expected an integer of 1 or more"),
    ],
)
def test_wrong_input_is_named(model, prompt, options, message):
    with pytest.raises(InputError, match=f"^{message}"):
        generate(model, None, [prompt], **options)


def test_prompts_are_a_list(model):
    for prompts in (None, b"text"):
        with pytest.raises(InputError, match=r"^prompts: expected a list of texts and lists of token ids, found "):
            generate(model, None, prompts)


def test_no_prompts_give_no_completions(model):
    assert generate(model, None, []) == []


def test_broken_weights_stop_the_text_and_say_why(folder):
    model = our_model(folder)
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    [completion] = generate(model, None, [[1, 2]], SamplingOptions(max_new_tokens=NEW))
    assert (completion.tokens, completion.stopped_by) == ([], "non_finite_logits")


def test_attention_is_not_cudnns_which_compiles_for_each_length_of_keys(model, monkeypatch):
    plain, enabled = F.scaled_dot_product_attention, []

    def recorded(*tensors, **options):
        enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return plain(*tensors, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    generate(model, None, prompts_of([5, 3]), SamplingOptions(max_new_tokens=3))
    assert before
    assert torch.backends.cuda.cudnn_sdp_enabled()
    assert set(enabled) == {False}  # of prompts, and of single tokens
    assert len(enabled) > 2 * model.config.num_hidden_layers


def test_a_model_in_training_is_left_in_training_without_gradients(folder):
    model = our_model(folder).train()
    before = torch.get_rng_state()
    generate(model, None, [[1, 2, 3]], SamplingOptions(max_new_tokens=3, temperature=1.0))
    assert model.training
    assert model.model.layers["0"].training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_under_fsdp_generates_what_the_plain_one_does_and_trains_on(folder, group_of_one):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    plain, sharded = our_model(folder).bfloat16(), our_model(folder)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    for block in sharded.model.layers.values():
        fully_shard(block, mp_policy=policy)
    fully_shard(sharded, mp_policy=policy)
    prompts = prompts_of([5, 9])
    options = SamplingOptions(max_new_tokens=6, stop_at_eos=False)
    assert generate(sharded, None, prompts, options) == generate(plain, None, prompts, options)
    sharded.train()
    training_loss(sharded).backward()
    assert all(parameter.grad is not None for parameter in sharded.parameters())


def training_loss(model):
    from kenotron.kernels.attention import attention

    tokens = torch.arange(4)
    loss, _ = model(tokens, Context((1, 4), tokens, attention), tokens)
    return loss


def test_a_compiled_model_generates_uncompiled(folder, model):
    """No shape of decoding is ever compiled: the compiler would be asked for each, and again and again."""
    compiled = our_model(folder)
    compilations = []

    def backend(graph, inputs):
        compilations.append(len(inputs))
        return graph.forward

    for block in compiled.model.layers.values():
        block.compile(backend=backend)
    prompts, options = prompts_of([5, 9]), SamplingOptions(max_new_tokens=4)
    assert generate(compiled, None, prompts, options) == generate(model, None, prompts, options)
    assert compilations == []
    training_loss(compiled)
    assert compilations, "training steps still compile"


def test_weights_take_the_configs_dtype_or_the_one_asked_for(tmp_path):
    path = save_ours(our_model(tmp_path), tmp_path / "c", dtype="bfloat16")
    for asked, expected in ((None, torch.bfloat16), ("float32", torch.float32), (torch.float16, torch.float16)):
        model = load_for_generation(path, asked, "cpu").model
        assert {parameter.dtype for parameter in model.parameters()} == {expected}
    with pytest.raises(InputError, match="generation in dtype 'int8'"):
        load_for_generation(path, "int8")


def test_a_damaged_checkpoint_is_named(tmp_path):
    path = save_ours(our_model(tmp_path), tmp_path / "checkpoints")
    file = flip_a_byte(next((path / "model").glob("*.safetensors")))
    with pytest.raises(InputError, match=f"{file.name} is damaged"):
        load_for_generation(path)
