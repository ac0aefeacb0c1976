"""Scores against the official ones (conformance/eval_metrics.json), against scipy, and by hand; and the official defects, avoided."""

import json
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from evaluation import metrics
from text.points import parse_points

FILE = json.loads((Path(__file__).parents[1] / "conformance" / "eval_metrics.json").read_text())
CASES, WORDS = FILE["cases"], FILE["text_metrics"]
MISALIGNED = "object 0 absent in frame 1 (mask list misaligned: reference quirk)"


def defect(case):
    """Is it one of the official defects of spec 13? Each has a test of its own below."""
    given = case["input"]
    return ((case["kind"] == "image_count" and given["text"] == "5")
            or (case["kind"] == "video_count" and given["text"].startswith("There are")) or given.get("name") == MISALIGNED)


def cases(kind):
    return [pytest.param(c["input"], c["expected"], id=str(c["input"].get("name", c["input"].get("text")))[:40])
            for c in CASES if c["kind"] == kind and not defect(c)]


def test_all_but_the_four_defective_cases_are_used():
    """Three defects; that of the count of a video has two cases."""
    assert sum(map(defect, CASES)) == 4
    assert len(CASES) - 4 == sum(len(cases(kind)) for kind in ("pointing_f1", "image_count", "video_count", "tracking"))


def box(h, w, corners):
    mask = np.zeros((h, w), bool)
    if corners:
        x0, y0, x1, y1 = corners
        mask[y0 : y1 + 1, x0 : x1 + 1] = True
    return mask


# ---------------------------------------------------------------------------------------------------------------
# points


@pytest.mark.parametrize(("given", "expected"), cases("pointing_f1"))
def test_point_scores_equal_the_official_ones(given, expected):
    masks = [box(given["h"], given["w"], corners) for corners in given["gt_boxes_as_masks_xyxy_inclusive"]]
    predicted = [(x, y) for _, _, x, y in parse_points(given["text"], given["w"], given["h"])]
    truth = [tuple(p) for p in given["gt_points"]]
    expected = pytest.approx([expected[k] for k in ("precision", "recall", "f1")], abs=1e-9)
    assert metrics.score_points(predicted, truth, metrics.in_mask(masks)) == expected
    numbered = [[(1, *p) for p in points] for points in (predicted, truth)]              # one image is a case of several
    assert metrics.score_images(*numbered, metrics.in_mask(masks)) == expected


def test_assignment_is_optimal():
    """Against every permutation, on square and oblong costs."""
    rng = np.random.default_rng(0)
    for n, m in ((1, 1), (3, 3), (2, 5), (5, 2), (4, 6), (5, 5), (0, 3)):
        for _ in range(10):
            cost = rng.random((n, m)).round(1)
            pairs = metrics.assign(cost)
            assert len({r for r, _ in pairs}) == len({c for _, c in pairs}) == len(pairs) == min(n, m)
            wide = cost if n <= m else cost.T
            best = min((sum(wide[i, p] for i, p in enumerate(ps)) for ps in permutations(range(wide.shape[1]), wide.shape[0])), default=0)
            assert sum(cost[r, c] for r, c in pairs) == pytest.approx(best)


def test_assignment_equals_scipy():
    optimize = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(1)
    for _ in range(50):
        cost = rng.random(rng.integers(1, 40, 2))
        rows, columns = optimize.linear_sum_assignment(cost)
        assert sum(cost[r, c] for r, c in metrics.assign(cost)) == pytest.approx(cost[rows, columns].sum())


def test_without_masks_a_hit_is_within_five_hundredths_of_the_diagonal_of_its_own_image_at_its_time():
    hit = metrics.near([(50, 50)], [(300, 400)])
    assert hit(0, (50 + 24.9, 50)) and not hit(0, (50 + 25.1, 50))
    hit = metrics.near([(1, 50, 50), (2, 50, 50)], [(300, 400), (30, 40)])
    assert hit(0, (1, 60, 50)) and not hit(1, (2, 60, 50)) and not hit(0, (2, 50, 50))
    hit = metrics.near([(1.5, 50, 50)], [(300, 400)])
    assert hit(0, (1.54, 50, 50)) and not hit(0, (1.6, 50, 50))


def test_points_of_several_images_are_matched_within_their_image_only():
    """Image 1 has an object at (2, 2), image 2 one at (8, 8). By distance alone each prediction would go to the other's."""
    masks, truth = [box(10, 10, (0, 0, 9, 9)), box(10, 10, (6, 6, 9, 9))], [(1, 2, 2), (2, 8, 8)]
    assert metrics.score_images([(1, 8, 8), (2, 2, 2)], truth, metrics.in_mask(masks)) == pytest.approx((0.5, 0.5, 0.5))
    assert metrics.score_images([(1, 1, 1), (2, 7, 7)], truth, metrics.in_mask(masks)) == pytest.approx((1, 1, 1))
    no_third = metrics.score_images([(3, 2, 2), (1, 2, 2)], truth, metrics.in_mask(masks))
    assert no_third == pytest.approx((0.5, 0.5, 0.5))
    assert metrics.score_images([], [], metrics.in_mask([])) == (1, 1, 1) and metrics.score_images([(1, 2, 2)], [], None) == (0, 0, 0)


def test_points_of_a_video_are_matched_in_time_and_place_and_hit_at_a_time_of_their_mask():
    """10 s of 100 x 100. Object 0 has a mask at 1 and 2 s (left half), object 1 at 2 and 9 s (right half)."""
    left, right, none = (box(100, 100, c) for c in ((0, 0, 49, 99), (50, 0, 99, 99), None))
    hit = metrics.in_film([1.0, 2.0, 9.0], [[left, left, none], [none, right, right]])
    truth, score = [(1.0, 20, 50), (9.0, 80, 50)], lambda *said: metrics.score_video(said, truth, hit, (10, 100, 100))
    assert score((1.0, 20, 50), (9.0, 80, 50)) == pytest.approx((1, 1, 1))
    assert score((2.0, 30, 50), (2.0, 70, 50)) == pytest.approx((1, 1, 1))               # another time, but one of the object's masks
    assert score((1.5, 20, 50), (9.0, 80, 50)) == pytest.approx((0.5, 0.5, 0.5))         # between two masks
    assert score((9.0, 20, 50), (1.0, 80, 50)) == pytest.approx((0, 0, 0))               # nearer in time than in place: both miss
    assert score((1.04, 20, 50)) == pytest.approx((1, 0.5, 2 / 3))
    assert metrics.score_video([], [], hit, (10, 100, 100)) == (1, 1, 1)
    still = metrics.score_video([(0.0, 1, 1)], [(0.0, 2, 2)], metrics.near([(0.0, 2, 2)], [(100, 100)]), (0, 100, 100))
    assert still == pytest.approx((1, 1, 1))                                             # a film of one picture


def test_distance_in_a_video_is_measured_in_hundredths_of_each_side():
    """Ten seconds off of ten, or ten pixels off of a thousand: unscaled, ten is ten and time would decide nothing."""
    hit = metrics.near([(0.0, 100, 50), (10.0, 112, 50)], [(1000, 1000)] * 2)
    said = [(10.0, 101, 50), (0.0, 111, 50)]
    assert metrics.score_video(said, [(0.0, 100, 50), (10.0, 112, 50)], hit, (10, 1000, 1000)) == pytest.approx((1, 1, 1))


def test_matching_is_done_on_numbers_rounded_to_a_tenth_of_a_hundredth():
    """As in the official code: two points 0.04 % apart are equally near to a third, and the first one said is matched."""
    hit = metrics.near([(0.0, 500, 500)], [(10, 10)])
    assert metrics.score_video([(0.0, 500.4, 500), (0.0, 500, 500)], [(0.0, 500, 500)], lambda k, p: p[1] == 500.4, (1, 1000, 1000))[1] == 1
    assert hit(0, (0.0, 500.4, 500))


# ---------------------------------------------------------------------------------------------------------------
# counts


@pytest.mark.parametrize(("text", "count"), [
    ("5", 5), (" 5. ", 5), ("There are none.", 0), ("Counting the <points coords=\"1 1 100 100\">x</points> shows a total of 3.", 3),
    ("There are 4 <points coords=\"1 1 100 100\">x</points>.", 4), ("<points coords=\"1 1 100 100 2 200 200\">x</points>", 2),
    ("many", None), ("", None)])
def test_counts_are_read_from_every_way_to_state_them(text, count):
    assert metrics.count_in(text) == count


@pytest.mark.parametrize("kind", ["image_count", "video_count"])
def test_counts_equal_the_official_ones(kind):
    for case in cases(kind):
        given, expected = case.values
        n = metrics.count_in(given["text"])
        assert n == expected["pred"], given
        assert metrics.score_count(n, given["gt"], kind == "video_count") == (expected["correct"], expected["close"]), given


def test_defect_a_bare_number_counts_as_a_count():
    (case,) = [c for c in CASES if c["kind"] == "image_count" and c["input"]["text"] == "5"]
    assert case["expected"] == {"pred": 0, "correct": 0, "close": 0}                     # the official code
    assert metrics.score_count(metrics.count_in("5"), case["input"]["gt"]) == (1, 1)


def test_defect_none_and_a_number_in_front_are_read_of_a_video():
    official = [c for c in CASES if c["kind"] == "video_count" and defect(c)]
    assert [c["expected"]["valid"] for c in official] == [False, False]
    for case in official:
        assert metrics.score_count(metrics.count_in(case["input"]["text"]), case["input"]["gt"], video=True) == (1, 1)


def test_no_number_at_all_is_never_right():
    assert metrics.score_count(metrics.count_in("many"), 0) == (0, 0) == metrics.score_count(None, 1, video=True)


def test_of_an_image_close_is_off_by_one_however_many_there_are():
    assert metrics.score_count(39, 40) == (0, 1) and metrics.score_count(38, 40) == (0, 0)


# ---------------------------------------------------------------------------------------------------------------
# tracks


def tracks_of(given):
    """A case -> predicted and true {frame: {id: point}}, and a hit in masks that are by object and frame."""
    predicted, truth = ({frame: {i: tuple(p) for i, p in objects.items()} for frame, objects in given[side]} for side in ("pred", "gt"))
    masks = {i: [box(given["h"], given["w"], c) for c in boxes] for i, boxes in given["mask_boxes_per_object_per_frame"].items()}
    return predicted, truth, lambda frame, i, p: frame < len(masks[i]) and metrics.inside(masks[i][frame], *p)


NAMES = {"precision": "precision", "recall": "recall", "f1": "f1", "HOTA": "hota", "DetA": "det_a", "AssA": "ass_a"}


@pytest.mark.parametrize(("given", "expected"), cases("tracking"))
def test_tracks_equal_the_official_ones(given, expected):
    ours = metrics.score_tracks(*tracks_of(given))
    assert ours == pytest.approx({NAMES[k]: v for k, v in expected.items() if k in NAMES}, abs=1e-9)


def test_defect_an_object_that_is_absent_from_a_frame_does_not_misalign_the_masks():
    (case,) = [c for c in CASES if c["input"].get("name") == MISALIGNED]
    assert case["expected"]["f1"] < 0.67                                                 # of a perfect prediction, officially
    assert metrics.score_tracks(*tracks_of(case["input"])) == pytest.approx(dict.fromkeys(NAMES.values(), 1.0), abs=1e-9)


def test_a_frame_that_holds_nothing_is_no_frame():
    """... and must not dilute the mean."""
    ours = metrics.score_tracks({0: {1: (1, 1)}, 1: {}}, {0: {"a": (9, 9)}, 2: {}}, lambda *_: False)
    assert ours == dict.fromkeys(NAMES.values(), 0)


def test_a_swap_of_identities_costs_association_and_nothing_else():
    """Two objects for four frames, the ids exchanged after two: every point is right, and a track holds half of each object.

    By hand: TP 8, so DetA 1. The best match of a frame has alignment 2 / (4 + 4 - 2) for either id: AssA = 2 / 6.
    """
    truth = {t: {"a": (1, 1), "b": (8, 8)} for t in range(4)}
    said = {t: {1: (1, 1), 2: (8, 8)} if t < 2 else {1: (8, 8), 2: (1, 1)} for t in range(4)}
    ours = metrics.score_tracks(said, truth, lambda t, i, p: p == truth[t][i])
    assert ours["f1"] == pytest.approx(1) and ours["det_a"] == 1 and ours["ass_a"] == pytest.approx(1 / 3)
    assert ours["hota"] == pytest.approx((1 / 3) ** 0.5)


def test_of_two_points_on_an_object_the_track_that_stays_with_it_is_matched():
    """Frame 0: tracks 1 and 2 both lie on the object, 1 nearer; later only 2 does. HOTA gives it all three frames."""
    truth = {t: {"a": (5, 5)} for t in range(3)}
    said = {0: {1: (5, 5), 2: (6, 5)}, 1: {2: (5, 5)}, 2: {2: (5, 5)}}
    ours = metrics.score_tracks(said, truth, lambda t, i, p: True)
    # TP 3, FP 1: DetA 3/4; all three pairs are (a, 2): AssA 3 / (3 + 3 - 3)
    assert ours["det_a"] == pytest.approx(0.75) and ours["ass_a"] == pytest.approx(1)


def reference_hota(similarities, n_true, n_predicted):
    """HOTA at one threshold with scipy's assignment, over dense arrays. similarities: [(ids of true, ids of predicted, matrix), ..]"""
    optimize = pytest.importorskip("scipy.optimize")
    potential, true, predicted = np.zeros((n_true, n_predicted)), np.zeros((n_true, 1)), np.zeros((1, n_predicted))
    for gt, pr, s in similarities:
        union = s.sum(0)[None, :] + s.sum(1)[:, None] - s
        potential[np.ix_(gt, pr)] += np.divide(s, union, out=np.zeros_like(s), where=union > 0)
        true[gt, 0] += 1
        predicted[0, pr] += 1
    with np.errstate(invalid="ignore"):
        alignment = potential / (true + predicted - potential)
    matches = np.zeros_like(potential)
    for gt, pr, s in similarities:
        gain = alignment[np.ix_(gt, pr)] * s
        rows, columns = optimize.linear_sum_assignment(-gain)
        for r, c in zip(rows, columns, strict=True):
            matches[gt[r], pr[c]] += s[r, c] > 0
    tp = matches.sum()
    det = tp / (true.sum() + predicted.sum() - tp)
    ass = (matches * matches / np.maximum(1, true + predicted - matches)).sum() / max(1, tp)
    return (det * ass) ** 0.5, det, ass


def test_hota_equals_a_dense_one_on_random_tracks():
    rng = np.random.default_rng(5)
    for _ in range(40):
        n, m, T = rng.integers(1, 6), rng.integers(1, 6), rng.integers(1, 8)
        where, said, truth, similarities = {}, {}, {}, []
        for t in range(T):
            gt, pr = (sorted(rng.choice(k, rng.integers(0, k + 1), replace=False).tolist()) for k in (n, m))
            s = (rng.random((len(gt), len(pr))) < 0.5).astype(float)
            truth[t], said[t] = {i: (t, i) for i in gt}, {j: (t, j) for j in pr}
            where |= {(t, i, (t, j)): s[a, b] for a, i in enumerate(gt) for b, j in enumerate(pr)}
            similarities.append((gt, pr, s))
        if not any(truth.values()) and not any(said.values()):
            continue
        ours = metrics.score_tracks(said, truth, lambda t, i, p, where=where: where[t, i, p])
        assert (ours["hota"], ours["det_a"], ours["ass_a"]) == pytest.approx(reference_hota(similarities, n, m)), (n, m, T)


# ---------------------------------------------------------------------------------------------------------------
# masks


def test_regions_are_compared_by_their_union():
    a, b = box(10, 10, (0, 0, 4, 9)), box(10, 10, (3, 0, 7, 9))
    assert metrics.jaccard(a, b) == pytest.approx(20 / 80) and metrics.jaccard(a, a) == 1
    assert metrics.jaccard(a & ~a, b & ~b) == 1 and metrics.jaccard(a, a & ~a) == 0


def test_a_boundary_is_where_neighbours_differ_and_the_edge_of_the_image_is_none():
    mask = box(6, 6, (2, 2, 3, 3))
    drawn = ["......", ".###..", ".#.#..", ".###..", "......", "......"]
    assert ["".join(".#"[v] for v in row) for row in metrics.boundary(mask).astype(int)] == drawn
    assert not metrics.boundary(np.ones((5, 5), bool)).any()


def test_a_boundary_is_found_again_within_its_tolerance():
    """854 x 480: 0.008 of the diagonal is 7.84, so 8 pixels."""
    true = box(480, 854, (200, 100, 399, 299))
    for shift, f in ((0, 1.0), (8, 1.0), (9, None)):
        moved = np.roll(true, shift, axis=1)
        score = metrics.boundary_f(moved, true)
        assert score == 1.0 if f else 0.4 < score < 0.6, shift        # the sides are lost, top and bottom found
    assert metrics.boundary_f(np.zeros_like(true), true) == 0 and metrics.boundary_f(np.zeros_like(true), np.zeros_like(true)) == 1
    assert metrics.j_and_f(np.array([true, true]), np.array([true, ~true & False])) == {"j": 0.5, "f": 0.5, "j_and_f": 0.5}
    with pytest.raises(ValueError, match="set against"):
        metrics.j_and_f(np.zeros((1, 4, 4), bool), np.zeros((2, 4, 4), bool))


def test_a_widened_mask_equals_a_dilation_with_a_disk():
    ndimage = pytest.importorskip("scipy.ndimage")
    rng = np.random.default_rng(2)
    for radius in (1, 2, 5):
        mask = rng.random((40, 30)) < 0.02
        y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
        assert np.array_equal(metrics.widened(mask, radius), ndimage.binary_dilation(mask, x * x + y * y <= radius * radius))


def test_masks_of_a_segmenter_are_scored_from_the_command_line(tmp_path, monkeypatch, capsys):
    """Two objects of one expression count as one region, in whatever order they were segmented."""
    true = np.zeros((2, 3, 20, 20), bool)
    true[0, :, 2:8, 2:8] = true[1, :, 12:18, 12:18] = True
    np.savez(tmp_path / "true.npz", **{"film/0": true, "film/0/times": np.arange(3), "image/0": np.zeros((1, 4, 4), bool)})
    np.savez(tmp_path / "said.npz", **{"film/0": true[::-1]})
    np.savez(tmp_path / "other.npz", **{"another/0": true})
    monkeypatch.setattr("sys.argv", ["metrics", "--predicted", str(tmp_path / "said.npz"), "--masks", str(tmp_path / "true.npz")])
    metrics.main()
    assert json.loads(capsys.readouterr().out) == {"j": 1.0, "f": 1.0, "j_and_f": 1.0, "n": 1}
    monkeypatch.setattr("sys.argv", ["metrics", "--predicted", str(tmp_path / "other.npz"), "--masks", str(tmp_path / "true.npz")])
    with pytest.raises(SystemExit) as end:
        metrics.main()
    assert end.value.code == 2 and "no array (n,t,h,w) 'film/0'" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------
# words


def text_score(kind, first, second):
    return {"vqa_score": lambda: metrics.vqa_score(second, first), "anls": lambda: metrics.anls(second, [first]),
            "relaxed_correctness": lambda: metrics.relaxed(second, [first]),
            "select_mc_option": lambda: metrics.select_option(first, second)}[kind]()


@pytest.mark.parametrize("case", WORDS, ids=lambda c: f"{c['kind']} {c['input']}"[:60])
def test_scores_of_words_equal_the_official_ones(case):
    assert text_score(case["kind"], *case["input"]) == pytest.approx(case["expected"])


def test_an_exact_answer_is_one_of_the_answers_letter_for_letter():
    assert metrics.exact(" Drawn.\n", ["Filmed.", "Drawn."]) == 1
    assert metrics.exact("drawn.", ["Drawn."]) == metrics.exact("Drawn", ["Drawn."]) == metrics.exact("", ["x"]) == 0


@pytest.mark.parametrize(("text", "same"), [
    ("A red-brown  dog.", "red brown dog"), ("Dont know", "don't know"), ("1,000", "1000"), ("3.5 m", "the 3.5 m"), ("yes!", "yes"),
    ("none", "0"), ("an   hour", "hour"), ("Ten", "10"), ("couldntve", "couldn't've"), ("well/known", "well known"), ("a, b", "b,")])
def test_answers_are_compared_without_what_does_not_matter(text, same):
    assert metrics.normal(text) == metrics.normal(same)


def test_answers_that_differ_stay_different():
    assert len({metrics.normal(t) for t in ("1.5", "15", "its", "it's", "dog", "dogs", "redbrown", "red brown")}) == 8


def test_where_fewer_than_three_people_answered_all_of_them_make_one():
    assert metrics.vqa_score("cat", ["cat"]) == metrics.vqa_score("cat", ["cat", "cat"]) == 1
    assert metrics.vqa_score("cat", ["cat", "dog"]) == 0.5


def test_edits_equal_those_of_every_script():
    """Against the definition, by recursion."""
    def slow(a, b):
        if not a or not b:
            return len(a) + len(b)
        return min(slow(a[1:], b) + 1, slow(a, b[1:]) + 1, slow(a[1:], b[1:]) + (a[0] != b[0]))

    rng = np.random.default_rng(3)
    for _ in range(60):
        a, b = ("".join(rng.choice(list("abc"), rng.integers(0, 6))) for _ in range(2))
        assert metrics.edits(a, b) == slow(a, b), (a, b)


def test_anls_takes_the_best_answer_and_cuts_below_a_half():
    assert metrics.anls("hallo", ["xyz", "hello"]) == pytest.approx(0.8)
    assert metrics.anls("ab", ["ac"]) == 0.5 and metrics.anls("abc", ["axx"]) == 0 and metrics.anls("", ["abc"]) == 0


@pytest.mark.parametrize(("text", "answer", "right"), [
    ("10.5", "10", 1), ("9.5", "10", 1), ("9.4", "10", 0), ("-5", "5", 0), ("0", "0", 1), ("0.0", "0", 1), ("0.01", "0", 0),
    ("5 %", "0.05", 1), ("ten", "10", 0), ("nan", "10", 0), ("inf", "10", 0), ("1e1", "10", 1), ("", "10", 0)])
def test_a_number_may_be_off_by_a_twentieth(text, answer, right):
    assert metrics.relaxed(text, [answer]) == right


@pytest.mark.parametrize(("text", "letters", "chosen"), [
    ("C. a leaf", True, 2), ("a leaf", True, 2), ("A leaf.", True, 2), ("c", True, 2), ("(C)", True, 2), ("C: whatever", True, 2),
    ("it must be a leaf, I think", True, 2), ("a leef", True, 2), ("b)", True, 1), ("D.", True, 0), ("", True, None), ("  ", False, None),
    ("a root", False, 1), ("b", False, 0), ("B. a leaf", True, 1), ("not a stem but a leaf", False, 0)])
def test_an_option_is_found_by_its_words_or_its_label(text, letters, chosen):
    """... or by what comes nearest, the first of equals, where no option is named or several are."""
    assert metrics.select_option(text, ["a stem", "a root", "a leaf"], letters) == chosen


def test_of_two_options_that_are_named_the_nearer_is_meant():
    assert metrics.select_option("not red but dark red", ["red", "dark red"]) == 1


def test_statements_of_a_caption_count_as_often_as_they_are_made():
    score = metrics.score_statements
    assert score("red circle, blue square", "blue square, red circle") == (1, 1)
    assert score("red circle, red circle, blue cross", "red circle, blue square") == (0.5, pytest.approx(1 / 3))
    assert score("", "red circle") == (0, 0) and score("Red circle.", "red circle") == (1, 1)
