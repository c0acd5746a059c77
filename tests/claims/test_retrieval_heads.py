"""The mask of questions, and the retrieval score of a head."""

import numpy as np

from experiments.claims import retrieval_heads


def test_a_question_sees_the_text_and_itself():
    seen = retrieval_heads.visible(2, 2, 2)
    assert seen.astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 1],
    ]


def test_a_head_retrieves_where_it_looks_at_an_answer_that_comes_out_right():
    places = np.array([[3, 4], [7, 8]])
    is_right = np.array([[True, True], [False, True]])
    largest = np.array(
        [
            [[3, 4], [3, 0], [4, 3]],  # three heads in the first text
            [[7, 8], [7, 0], [8, 7]],
        ]
    )
    found = retrieval_heads.copied(largest, places, is_right)
    np.testing.assert_allclose(found, [1, 1 / 3, 0])


def test_no_right_answer_is_no_retrieval():
    found = retrieval_heads.copied(
        np.array([[[3], [2]]]), np.array([[3]]), np.array([[False]])
    )
    np.testing.assert_array_equal(found, [0, 0])
