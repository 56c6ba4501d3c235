"""Random calls of our nodes in onnxruntime under a sanitizer: `make fuzz-native`. FUZZ_LIBRARY names the library."""

import os

import onnx_nodes
import pytest
from hypothesis import given
from strategies import fuzz, node_calls

LIBRARY = os.environ.get("FUZZ_LIBRARY")


@pytest.mark.skipif(not LIBRARY, reason="FUZZ_LIBRARY names no library; make fuzz-native sets it")
@fuzz(100)
@given(node_calls())
def test_a_node_runs_or_is_refused_in_our_words(calls):
    graph, threads, inputs = calls
    for arrays in inputs:
        result = onnx_nodes.outcome(lambda: onnx_nodes.run(onnx_nodes.session_of(graph, LIBRARY, threads), arrays))  # noqa: B023
        assert not isinstance(result, str) or " must " in result, graph
