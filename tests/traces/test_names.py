"""Names of communication kernels of every generation, and torch's words for collectives."""

import pytest

from raybench.traces.names import (
    annotation_collective,
    element_bytes,
    kernel_collective,
    spoken_collective,
    wire_factor,
)

KERNELS = [
    # NCCL 2.0 to 2.3
    ("ncclAllReduceKernel_sum_f32(ncclColl)", "all_reduce"),
    ("void ncclAllReduceLLKernel_sum_f16(ncclColl)", "all_reduce"),
    # 2.4 to 2.7
    ("ncclAllReduceRingLLKernel_sum_f32(ncclColl)", "all_reduce"),
    ("ncclAllReduceTreeLLKernel_sum_f16(ncclColl)", "all_reduce"),
    ("ncclReduceScatterRingLLKernel_sum_f32(ncclColl)", "reduce_scatter"),
    ("ncclAllGatherRingLLKernel_copy_i8(ncclColl)", "all_gather"),
    ("ncclBroadcastRingLLKernel_copy_i8(ncclColl)", "broadcast"),
    ("ncclReduceRingLLKernel_sum_f32(ncclColl)", "reduce"),
    ("ncclSendRecvKernel_copy_i8(ncclColl)", "p2p"),
    # 2.8 to 2.18
    ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce"),
    ("ncclKernel_AllReduce_TREE_LL128_Sum_half(ncclDevComm*, unsigned long, ncclWork*)", "all_reduce"),
    ("ncclKernel_ReduceScatter_RING_LL_Sum___nv_bfloat16(ncclDevComm*, unsigned long, ncclWork*)", "reduce_scatter"),
    ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", "all_gather"),
    ("ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", "broadcast"),
    ("ncclKernel_Reduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "reduce"),
    ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", "p2p"),
    # 2.19 on
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)", "all_reduce"),
    ("ncclDevKernel_AllReduce_Sum_bf16_TREE_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
    ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
    ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
    ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "broadcast"),
    ("ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce"),
    ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "p2p"),
    # symmetric memory, 2.27 on
    ("ncclSymDevKernel_AllReduce_AGxLL_R_Sum_f32(ncclSymDevArgs)", "all_reduce"),
    ("ncclSymkDevKernel_ReduceScatter_LDMC_sum_bf16(ncclSymkDevWorkArgs4K)", "reduce_scatter"),
    ("ncclSymDevKernel_AllGather_STMC(ncclSymDevArgs)", "all_gather"),
    # RCCL
    ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "unknown"),
    ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "unknown"),
    ("ncclDevKernelDebug_Generic(ncclDevKernelArgsStorage<4096ul>)", "unknown"),
    ("ncclKernel_Generic(ncclDevComm*, unsigned long, ncclWork*)", "unknown"),
    ("mscclKernel_Sum_half_Simple_false(ncclDevComm*, mscclAlgo*, mscclWork*)", "unknown"),
    # torch's symmetric memory
    ("void c10d::symmetric_memory::(anonymous namespace)::two_shot_all_reduce_kernel_inplace<4>()", "all_reduce"),
    ("multimem_all_gather_kernel<16>(char*, char*)", "all_gather"),
    # no communication
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(float)", None),
    ("void at::native::scatter_gather_elementwise_kernel<128, 8>(int)", None),
    ("ampere_sgemm_128x64_tn", None),
    ("triton_per_fused__all_reduce_sum_0", None),
    ("Memcpy DtoD (Device -> Device)", None),
    ("ncclCommInitRank", None),
    ("", None),
]
SPOKEN = [
    ("allreduce", "all_reduce"),
    ("allreduce_coalesced", "all_reduce"),
    ("_allgather_base", "all_gather"),
    ("allgather_into_tensor_coalesced", "all_gather"),
    ("_all_gather_base", "all_gather"),
    ("_reduce_scatter_base", "reduce_scatter"),
    ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
    ("all_to_allv", "all_to_all"),
    ("alltoall_base", "all_to_all"),
    ("broadcast", "broadcast"),
    ("_broadcast_oop", "broadcast"),
    ("_reduce_oop", "reduce"),
    ("send 0->1", "p2p"),
    ("recv 1<-0", "p2p"),
    ("receive", "p2p"),
    ("coalesced", "p2p"),
    ("barrier", "barrier"),
    ("wait", None),
    ("init", None),
]


@pytest.mark.parametrize(("name", "collective"), KERNELS)
def test_kernels(name, collective):
    assert kernel_collective(name) == collective


@pytest.mark.parametrize(("name", "collective"), SPOKEN)
def test_words(name, collective):
    assert spoken_collective(name) == collective


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("nccl:all_reduce", ("all_reduce", False)),
        ("nccl:_all_gather_base", ("all_gather", False)),
        ("gloo:all_reduce", ("all_reduce", True)),
        ("gloo:recv", ("p2p", True)),
        ("nccl:something_new", ("unknown", False)),
        ("## nccl:all_reduce ##", None),
        ("aten::all", None),
    ],
)
def test_annotations(name, found):
    assert annotation_collective(name) == found


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("Float", 4),
        ("BFloat16", 2),
        ("c10::Half", 2),
        ("long int", 8),
        ("Float8_e4m3fn", 1),
        ("Byte", 1),
        ("odd", None),
    ],
)
def test_element_sizes(dtype, size):
    assert element_bytes(dtype) == size


def test_wire_factors():
    assert wire_factor("all_reduce", 4) == 1.5
    assert wire_factor("all_gather", 4) == 0.75
    assert wire_factor("p2p", 2) == 1.0
    assert wire_factor("barrier", 4) is None
    assert wire_factor("all_reduce", 1) is None
