"""The CUDA forward against float64: representatives, selections, outputs; every path, two runs with equal bits.

Runs under pytest, or as a program where there is none; an argument then picks the cases whose name contains it.
"""

import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import forward_kernels as fk
from alone import over, run_tests, skip

if not torch.cuda.is_available():
    skip("needs a GPU")

LIBRARY = fk.load_library()

# name: q heads, kv heads, head_dim, [(q_len, kv_len)], settings
CASES = {
    "paper_32k_setting": (16, 8, 128, [(3000, 3000)], {}),
    "paper_4k_setting": (16, 8, 128, [(2048, 2048)], dict(init=16, local=128, top_k=2)),
    "group_4": (32, 8, 128, [(1500, 1500)], dict(init=32, local=64, top_k=8)),
    "group_6": (12, 2, 128, [(2100, 2100)], dict(init=32, local=128, top_k=16)),
    "group_1": (4, 4, 128, [(1700, 1700)], dict(init=16, local=64, top_k=5)),
    "group_3": (9, 3, 64, [(1300, 1300)], dict(init=16, local=128, top_k=4)),
    "group_8": (8, 1, 64, [(1100, 1100)], dict(init=0, local=16, top_k=7)),
    "group_11": (11, 1, 128, [(700, 700)], dict(init=16, local=0, top_k=3)),
    "group_16": (16, 1, 128, [(900, 900)], dict(init=0, local=0, top_k=1)),
    "top_k_64": (4, 2, 128, [(6000, 6000)], dict(init=16, local=32, top_k=64)),
    "streaming": (4, 2, 128, [(1000, 1000)], dict(init=32, local=128, top_k=0)),
    "dense": (4, 2, 128, [(777, 777)], dict(dense_below=1 << 20, top_k=4)),
    "a_band_of_several_segments": (4, 2, 128, [(5000, 5000)], dict(dense_below=1 << 20, top_k=4)),
    "dense_below": (4, 2, 64, [(2000, 2000)], dict(init=16, local=64, top_k=4, dense_below=800)),
    "all_candidates_fit": (4, 2, 128, [(1000, 1000)], dict(init=16, local=32, top_k=64)),
    "batch_of_lengths": (
        8,
        4,
        128,
        [(1, 1), (300, 300), (17, 900), (1, 2222), (1111, 1111), (500, 1503)],
        dict(init=16, local=64, top_k=6),
    ),
    "pages": (8, 4, 128, [(700, 700), (129, 1500), (1, 333)], dict(init=16, local=64, top_k=6, page_size=64)),
    "group_maximum": (8, 2, 128, [(1400, 1400)], dict(init=16, local=64, top_k=6, group_reduce="max")),
    "each_head_chooses": (8, 2, 128, [(1400, 1400)], dict(init=16, local=64, top_k=6, group_reduce="none")),
    "scores_wanted": (8, 4, 128, [(1400, 1400)], dict(init=16, local=64, top_k=6, want_scores=True)),
    "parts_2": (16, 8, 128, [(3000, 3000)], dict(parts=2, init=32, local=256, top_k=8)),
    "parts_4": (12, 2, 128, [(2100, 2100)], dict(parts=4, init=32, local=128)),
    "parts_8": (9, 3, 64, [(2500, 2500)], dict(parts=8, init=16, local=128)),
    "parts_8_long": (4, 2, 128, [(9000, 9000)], dict(parts=8, init=16, local=128)),
    "parts_2_of_64": (32, 8, 64, [(1500, 1500)], dict(parts=2, init=16, local=64, top_k=5)),
    "parts_4_group_1": (4, 4, 128, [(1700, 1700)], dict(parts=4, init=16, local=64, top_k=5)),
    "parts_8_group_1": (2, 2, 128, [(3700, 3700)], dict(parts=8, init=16, local=64, top_k=12)),
    "parts_4_group_16": (16, 1, 128, [(900, 900)], dict(parts=4, init=0, local=0, top_k=3)),
    "parts_8_top_k_64": (4, 2, 128, [(6000, 6000)], dict(parts=8, init=16, local=32, top_k=64)),
    "parts_4_batch_of_lengths": (
        8,
        4,
        128,
        [(1, 1), (300, 300), (17, 900), (1, 2222), (1111, 1111), (500, 1503)],
        dict(parts=4, init=16, local=64, top_k=6),
    ),
    "parts_2_pages": (8, 4, 128, [(700, 700), (129, 1500), (1, 333)], dict(parts=2, init=16, local=64, page_size=64)),
    "parts_8_pages": (8, 4, 128, [(700, 700), (129, 1500), (1, 333)], dict(parts=8, init=16, local=64, page_size=48)),
    "parts_4_maximum": (8, 2, 128, [(1400, 1400)], dict(parts=4, init=16, local=64, top_k=6, group_reduce="max")),
    "parts_8_each_head": (8, 2, 128, [(1400, 1400)], dict(parts=8, init=16, local=64, top_k=6, group_reduce="none")),
    "parts_2_scores_wanted": (8, 4, 128, [(1400, 1400)], dict(parts=2, init=16, local=64, top_k=6, want_scores=True)),
    "parts_8_scores_wanted": (8, 4, 128, [(1400, 1400)], dict(parts=8, init=16, local=64, top_k=6, want_scores=True)),
    "dim_80": (10, 2, 80, [(1500, 1500), (17, 900)], dict(init=16, local=64, top_k=6)),
    "dim_80_parts_4": (4, 4, 80, [(1500, 1500)], dict(init=16, local=64, top_k=6, parts=4, page_size=64)),
    "dim_80_dense": (32, 32, 80, [(777, 777)], dict(dense_below=1 << 20, top_k=0)),
    "dim_96": (9, 3, 96, [(1500, 1500), (1, 33)], dict(init=16, local=64, top_k=6)),
    "dim_96_parts_8": (8, 2, 96, [(1500, 1500)], dict(init=16, local=64, top_k=6, parts=8, group_reduce="none")),
    "dim_96_dense": (16, 1, 96, [(777, 777)], dict(dense_below=1 << 20, top_k=0)),
    "dim_256": (4, 1, 256, [(1500, 1500), (100, 1111)], dict(init=16, local=64, top_k=6)),
    "dim_256_paper": (8, 4, 256, [(2500, 2500)], dict(init=32, local=256, top_k=8, parts=2)),
    "dim_256_group_16": (16, 1, 256, [(700, 700)], dict(init=0, local=0, top_k=3, parts=8, page_size=48)),
    "dim_256_dense": (4, 2, 256, [(777, 777), (1, 1)], dict(dense_below=1 << 20, top_k=0)),
    "group_5": (10, 2, 128, [(1300, 1300)], dict(init=16, local=128, top_k=4)),
    "group_7": (14, 2, 64, [(1300, 1300)], dict(init=16, local=128, top_k=4)),
    "group_5_parts_8": (10, 2, 64, [(2500, 2500)], dict(init=16, local=128, top_k=7, parts=8)),
    "group_7_parts_2": (14, 2, 128, [(1300, 1300), (30, 3000)], dict(init=16, local=128, top_k=4, parts=2)),
    "group_6_top_k_64": (12, 2, 64, [(300, 9000)], dict(init=32, local=256, top_k=64)),
    "group_11_parts_2": (11, 1, 64, [(1300, 1300)], dict(init=0, local=0, top_k=20, parts=2)),
    "group_9": (9, 1, 128, [(1300, 1300)], dict(init=16, local=128, top_k=4)),
    "group_12": (12, 1, 64, [(1300, 1300)], dict(init=16, local=128, top_k=4)),
    "window": (4, 2, 128, [(1500, 1500), (17, 900), (1, 2000)], dict(window=512)),
    "window_of_one": (4, 2, 128, [(300, 300)], dict(window=1)),
    "window_of_17": (8, 1, 64, [(300, 300), (40, 55)], dict(window=17, page_size=64)),
    "window_of_15_each_head": (8, 2, 128, [(300, 300)], dict(window=15, group_reduce="none")),
    "window_beyond_the_text": (4, 2, 64, [(400, 400), (3, 90)], dict(window=4096)),
    "window_of_128_sinks": (64, 8, 64, [(500, 500), (64, 1000)], dict(window=128, sinks=True)),
    "window_of_2047": (8, 8, 96, [(2600, 2600)], dict(window=2047)),
    "window_80": (8, 4, 80, [(900, 900)], dict(window=100, sinks=True)),
    "window_256": (4, 1, 256, [(1300, 1300), (33, 700)], dict(window=512, page_size=16)),
    "window_256_sinks": (16, 16, 256, [(500, 500)], dict(window=33, sinks=True)),
    "dense_sinks": (64, 8, 64, [(700, 700), (7, 300)], dict(dense_below=1 << 20, top_k=0, sinks=True)),
    "sinks": (8, 4, 128, [(1500, 1500)], dict(init=16, local=64, top_k=6, sinks=True)),
}


@over(architecture=fk.ARCHITECTURES, dtype=[torch.bfloat16, torch.float16], name=list(CASES))
def test_forward_matches_the_reference(name, dtype, architecture):
    heads_q, heads_kv, dim, lens, settings = CASES[name]
    LIBRARY.phsa_cuda_set_architecture(architecture)
    q, k, v, flags = fk.make_inputs(lens, heads_q, heads_kv, dim, dtype, seed=len(name))
    if "sinks" in settings:
        generator = torch.Generator("cuda").manual_seed(3)
        settings = {**settings, "sinks": 3 * torch.randn(heads_q, generator=generator, device="cuda")}
    f = fk.Forward(LIBRARY, q, k, v, lens, flags=flags, **settings)
    f.run()
    torch.cuda.synchronize()
    assert torch.isfinite(f.out).all()
    generator = torch.Generator().manual_seed(7)
    for s, (q_len, kv_len) in enumerate(lens):
        queries = sorted({*torch.randint(q_len, (24,), generator=generator).tolist(), 0, q_len - 1})
        if f.top_k and kv_len >= fk.BLOCK:
            want = fk.reference_reps(f, s)
            assert fk.relative_error(f.rep_rows(s), want) < (3e-3 if dtype == torch.bfloat16 else 4e-4)
        checked, differing, gap = fk.check_selection(f, s, queries)
        assert gap < 1, f"{differing} of {checked} lists differ, by up to {gap} times what rounding allows"
        want, lse = fk.reference_attention(f, s, queries)
        rows = [f.q_starts[s] + i for i in queries]
        assert fk.relative_error(f.out[rows], want) < (6e-3 if dtype == torch.bfloat16 else 1e-3)
        assert (f.lse[rows] - lse).abs().max() < 2e-3
    first = f.out.clone(), f.lse.clone(), f.selection.clone()
    f.out.fill_(float("nan"))
    f.lse.fill_(float("nan"))
    f.selection.fill_(-7)
    f.run()
    torch.cuda.synchronize()
    for a, b in zip(first, (f.out, f.lse, f.selection), strict=True):
        assert torch.equal(a, b)


@over(architecture=fk.ARCHITECTURES, top_k=[9, 16, 40], parts=[1, 2, 4, 8])
def test_equal_scores_go_to_the_lower_blocks(architecture, top_k, parts):
    LIBRARY.phsa_cuda_set_architecture(architecture)
    lens = [(5000, 5000)]
    q, k, v, _ = fk.make_inputs(lens, 4, 2, 128, torch.bfloat16)
    k[:] = k[:1]  # every block is the same
    f = fk.Forward(LIBRARY, q, k, v, lens, init=32, local=64, top_k=top_k, parts=parts)
    f.run()
    last = f.selection[4999]
    assert (last == torch.arange(2, 2 + top_k, device="cuda")).all()


@over(architecture=fk.ARCHITECTURES, heads=[(4, 4), (4, 2), (12, 2)], parts=[1, 2, 4, 8])
def test_of_two_equal_blocks_the_lower_is_chosen_first(architecture, heads, parts):
    """With an odd K the last place is often contested by two equal blocks."""
    LIBRARY.phsa_cuda_set_architecture(architecture)
    lens = [(4096, 4096)]
    q, k, v, _ = fk.make_inputs(lens, *heads, 128, torch.bfloat16)
    blocks = k.view(-1, 2, fk.BLOCK, heads[1], 128)
    blocks[:, 1] = blocks[:, 0]
    f = fk.Forward(LIBRARY, q, k, v, lens, init=32, local=64, top_k=7, parts=parts)
    f.run()
    lists = f.selection[1024:]
    chosen = torch.zeros(*lists.shape[:2], 256, dtype=torch.bool, device="cuda").scatter_(2, lists.long(), True)
    lower, upper = chosen[..., 0::2], chosen[..., 1::2]
    assert not (upper & ~lower).any()
    assert (lower & ~upper).any()


@over(architecture=fk.ARCHITECTURES)
def test_one_sharp_score_is_always_found(architecture):
    LIBRARY.phsa_cuda_set_architecture(architecture)
    lens = [(9000, 9000)]
    q, k, v, _ = fk.make_inputs(lens, 4, 2, 128, torch.bfloat16)
    k[1600:1616] = 2.5 * q[8999, ::2]  # block 100 answers the last query; all else is near 2^-80 beside it
    f = fk.Forward(LIBRARY, q, k, v, lens, init=16, local=64, top_k=4)
    f.run()
    checked, _, gap = fk.check_selection(f, 0, range(8980, 9000))
    assert checked == 40 and gap < 1
    assert (f.selection[8999] == 100).any(1).all()


@over(architecture=fk.ARCHITECTURES, dtype=[torch.bfloat16, torch.float16])
def test_scores_far_above_the_first_ones_are_weighed_right(architecture, dtype):
    """The reference value of the softmax must follow: in chosen blocks, and in the query's own."""
    LIBRARY.phsa_cuda_set_architecture(architecture)
    lens = [(3000, 3000)]
    q, k, v, _ = fk.make_inputs(lens, 4, 2, 128, dtype)
    k[1600:1616] = 2.5 * q[2900, ::2]  # block 100 answers the queries near 2900
    k[2990] = 3.0 * q[2995, ::2]
    f = fk.Forward(LIBRARY, q, k, v, lens, init=16, local=64, top_k=4)
    f.run()
    queries = list(range(2880, 3000))
    want, lse = fk.reference_attention(f, 0, queries)
    assert (f.selection[2900] == 100).any(1).all()
    assert float(lse.max() - lse.min()) > 20
    assert fk.relative_error(f.out[queries], want) < (6e-3 if dtype == torch.bfloat16 else 1e-3)
    assert (f.lse[queries] - lse).abs().max() < 2e-2


@over(architecture=fk.ARCHITECTURES, heads=[(4, 2), (8, 2), (16, 1)], parts=[1, 2, 8])
def test_bounds_far_above_the_scores_lose_no_block(architecture, heads, parts):
    """Each head of a group likes another one of neighbouring blocks: together they look better than any block is."""
    LIBRARY.phsa_cuda_set_architecture(architecture)
    heads_q, heads_kv = heads
    group = heads_q // heads_kv
    length = 12288
    lens = [(length, length)]
    q, k, v, _ = fk.make_inputs(lens, heads_q, heads_kv, 128, torch.bfloat16)
    k *= 0.1
    k.view(-1, fk.BLOCK, heads_kv, 128)[
        torch.arange(length // fk.BLOCK), ..., torch.arange(length // fk.BLOCK) % group
    ] += 8
    q *= 0.1
    for h in range(heads_q):
        q[:, h, h % group] += 6
    f = fk.Forward(LIBRARY, q, k, v, lens, init=32, local=64, top_k=16, parts=parts)
    f.run()
    checked, _, gap = fk.check_selection(f, 0, range(length - 40, length, 5))
    assert checked == 8 * heads_kv and gap < 1


@over(
    architecture=fk.ARCHITECTURES,
    highest=["end", "middle", "beginning"],
    heads=[(4, 2), (12, 2)],
    growing=["half of the heads", "all heads"],
    parts=[1, 4],
)
def test_scores_that_keep_growing_are_ranked_right(architecture, highest, heads, growing, parts):
    """What the kernels keep of blocks is relative to scores that are left far behind, time and again. Where all heads
    agree, most blocks' scores are no numbers of f32.

    By `rounding`, scores of 106 may be off by 8e-4, those of 12 that the other tests have by 9e-5.
    """
    LIBRARY.phsa_cuda_set_architecture(architecture)
    length = 12288
    lens = [(length, length)]
    q, k, v, _ = fk.make_inputs(lens, *heads, 128, torch.bfloat16)
    ramp = torch.linspace(0, 1, length, device="cuda")
    ramp = {"end": ramp, "middle": 1 - (2 * ramp - 1).abs(), "beginning": 1 - ramp}[highest]
    k *= 0.2
    k[:, :, 0] += 12 * ramp[:, None].to(k.dtype)
    q *= 0.2
    # 150 powers of two from the lowest block to the highest; the other heads hardly mind
    q[:, :: 2 if growing.startswith("half") else 1, 0] += 100
    f = fk.Forward(LIBRARY, q, k, v, lens, init=32, local=64, top_k=16, parts=parts)
    f.run()
    checked, differing, gap = fk.check_selection(f, 0, range(0, length, 601))
    assert checked > 30 and gap < 1, f"{differing} of {checked} lists differ, by up to {gap} times what rounding allows"


@over(
    architecture=fk.ARCHITECTURES,
    heads=[(4, 4, 128), (4, 2, 128), (9, 3, 64), (12, 2, 128), (16, 1, 64)],
    group_reduce=["sum", "max", "none"],
    sharpness=[30, 300, 3000],
    parts=[1, 2, 8],
)
def test_scores_further_apart_than_f32_reaches_are_ranked_right(architecture, heads, group_reduce, sharpness, parts):
    """Up to thousands of powers of two between neighbouring blocks: all but a few softmax values are zero in f32."""
    LIBRARY.phsa_cuda_set_architecture(architecture)
    heads_q, heads_kv, dim = heads
    lens = [(2600, 2600), (70, 1900)]
    q, k, v, flags = fk.make_inputs(lens, heads_q, heads_kv, dim, torch.bfloat16)
    q *= sharpness
    settings = dict(init=16, local=64, top_k=12, group_reduce=group_reduce, flags=flags, parts=parts)
    f = fk.Forward(LIBRARY, q, k, v, lens, want_scores=sharpness == 300, **settings)
    f.run()
    for s, (q_len, _) in enumerate(lens):
        checked, differing, gap = fk.check_selection(f, s, range(q_len - 1, 0, -(q_len // 23)))
        assert checked >= 20 and gap < 1, f"{differing} of {checked} differ, by up to {gap} times what rounding allows"
    want = f.selection.clone()
    f.select()
    assert torch.equal(f.selection, want)


@over(architecture=fk.ARCHITECTURES, top_k=[3, 16, 64], parts=[1, 4])
def test_tiny_scores_far_behind_a_large_one_are_ranked_right(architecture, top_k, parts):
    """One local block has all of the softmax; what is chosen has scores of e^-1000 and less, and equal ones go to the
    lower block."""
    LIBRARY.phsa_cuda_set_architecture(architecture)
    lens = [(6000, 6000)]
    q, k, v, _ = fk.make_inputs(lens, 4, 2, 128, torch.bfloat16)
    k[5960:5976, :, :] = 0
    k[5960:5976, :, 0] = 400
    q[:, :, 0] = 40
    k[1600:1616] = k[3200:3216]  # blocks 100 and 200 are alike
    k[1600:1616, :, 0] += 1
    k[3200:3216, :, 0] += 1
    f = fk.Forward(LIBRARY, q, k, v, lens, init=16, local=64, top_k=top_k, parts=parts)
    f.run()
    checked, differing, gap = fk.check_selection(f, 0, range(5984, 6000))
    assert checked == 32 and gap < 1, (
        f"{differing} of {checked} lists differ, by up to {gap} times what rounding allows"
    )
    chosen = f.selection[5984:]
    assert ((chosen == 100).any(-1) >= (chosen == 200).any(-1)).all()


@over(architecture=fk.ARCHITECTURES, parts=[1, 4])
def test_a_query_that_is_no_number_harms_no_other(architecture, parts):
    LIBRARY.phsa_cuda_set_architecture(architecture)
    lens = [(4096, 4096)]
    q, k, v, flags = fk.make_inputs(lens, 4, 2, 128, torch.bfloat16)
    f = fk.Forward(LIBRARY, q, k, v, lens, flags=flags, init=32, local=64, top_k=8, parts=parts)
    f.run()
    want = f.selection.clone()
    q[3000, 1] = float("nan")
    q[3500, 2] = float("inf")
    f.run()
    torch.cuda.synchronize()
    others = [i for i in range(4096) if i not in (3000, 3500)]
    assert torch.equal(f.selection[others], want[others])


@over(architecture=fk.ARCHITECTURES)
def test_lists_that_lead_beyond_the_keys_are_cut(architecture):
    LIBRARY.phsa_cuda_set_architecture(architecture)
    lens = [(2000, 2000)]
    q, k, v, flags = fk.make_inputs(lens, 4, 2, 128, torch.bfloat16)
    f = fk.Forward(LIBRARY, q, k, v, lens, flags=flags, init=16, local=64, top_k=4)
    f.run()
    want = f.out.clone()
    last = f.selection[:, :, -1].clone()
    f.selection[:, :, -1] = torch.where(last < 0, last, 1 << 20)
    f.attend()
    torch.cuda.synchronize()
    assert torch.isfinite(f.out).all()
    unread = (last < 0).all(1)
    assert unread.any() and not unread.all()
    assert fk.relative_error(f.out[unread], want[unread].double()) < 6e-3


@over(architecture=fk.ARCHITECTURES)
def test_error_is_at_most_twice_that_of_dense_attention(architecture):
    LIBRARY.phsa_cuda_set_architecture(architecture)
    lens = [(2048, 2048)]
    q, k, v, flags = fk.make_inputs(lens, 16, 8, 128, torch.bfloat16)
    f = fk.Forward(LIBRARY, q, k, v, lens, flags=flags, init=16, local=128, top_k=64, dense_below=0)
    f.run()
    queries = list(range(0, 2048, 37))
    want, _ = fk.reference_attention(f, 0, queries)
    dense = fk.Forward(LIBRARY, q, k, v, lens, dense_below=1 << 20, top_k=0)
    torch_dense = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], is_causal=True, enable_gqa=True
    )
    want_dense, _ = fk.reference_attention(dense, 0, queries)
    error = fk.relative_error(f.out[queries], want)
    error_dense = fk.relative_error(torch_dense[0].transpose(0, 1)[queries], want_dense)
    assert error <= 2 * error_dense


@over(architecture=fk.ARCHITECTURES, parts=[2, 4, 8])
def test_representatives_written_in_chunks_have_the_bits_of_one_pass(architecture, parts):
    """Also where a chunk ends inside a block: its first parts are written then, the others with their last tokens."""
    LIBRARY.phsa_cuda_set_architecture(architecture)
    lens = [(1000, 1000)]
    q, k, v, flags = fk.make_inputs(lens, 4, 2, 128, torch.bfloat16)
    whole = fk.Forward(LIBRARY, q, k, v, lens, flags=flags, init=16, local=64, top_k=4, parts=parts, page_size=64)
    whole.represent()
    want = whole.rep_rows(0).clone()
    whole.reps.fill_(float("nan"))
    for begin, end in ((0, 3), (3, 17), (17, 24), (24, 500), (500, 1000)):
        whole.d_kv_lens.fill_(end)
        whole.cu_q[1] = end - begin
        whole._call(LIBRARY.phsa_cuda_represent, 0)
    torch.cuda.synchronize()
    assert torch.equal(whole.rep_rows(0), want)


@over(architecture=fk.ARCHITECTURES, dim=[64, 80, 96, 128, 256])
def test_a_window_reads_no_token_before_it(architecture, dim):
    """What lies there is no number: one token too many, and the output is none either."""
    LIBRARY.phsa_cuda_set_architecture(architecture)
    lens = [(16, 1000)]
    q, k, v, _ = fk.make_inputs(lens, 4, 2, dim, torch.bfloat16)
    want = fk.Forward(LIBRARY, q, k, v, lens, window=100)
    want.run()
    k[:885] = v[:885] = 1e30
    f = fk.Forward(LIBRARY, q, k, v, lens, window=100)
    f.run()
    torch.cuda.synchronize()
    assert torch.equal(f.out, want.out)
    k[885] = v[885] = 1e30  # the first query's first token
    f.run()
    torch.cuda.synchronize()
    assert not torch.equal(f.out[0], want.out[0]) and torch.equal(f.out[1:], want.out[1:])


@over(name=["top_k", "parts", "head_dim"])
def test_what_the_kernels_do_not_take_is_refused_by_name(name):
    lens = [(64, 64)]
    q, k, v, _ = fk.make_inputs(lens, 2, 1, 192 if name == "head_dim" else 128, torch.bfloat16)
    try:
        fk.Forward(LIBRARY, q, k, v, lens, **{"top_k": dict(top_k=65), "parts": dict(parts=3)}.get(name, {}))
    except ValueError as error:
        assert name in str(error)
    else:
        raise AssertionError("not refused")


if __name__ == "__main__":
    sys.exit(run_tests(globals(), sys.argv[1:]))
