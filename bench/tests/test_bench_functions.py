"""What functions of benches are given by those who start them."""

from bench.data_passing.nodes import function_environment


def test_function_of_a_bench_sees_no_gpu_of_the_machine() -> None:
    assert function_environment("unix:/nowhere", "credential")["CUDA_VISIBLE_DEVICES"] == ""
