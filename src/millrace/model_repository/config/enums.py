"""Enumerations of config.pbtxt, with their numbers in the protocol."""

from enum import IntEnum


class DataType(IntEnum):
    TYPE_INVALID = 0
    TYPE_BOOL = 1
    TYPE_UINT8 = 2
    TYPE_UINT16 = 3
    TYPE_UINT32 = 4
    TYPE_UINT64 = 5
    TYPE_INT8 = 6
    TYPE_INT16 = 7
    TYPE_INT32 = 8
    TYPE_INT64 = 9
    TYPE_FP16 = 10
    TYPE_FP32 = 11
    TYPE_FP64 = 12
    TYPE_STRING = 13
    TYPE_BF16 = 14


def item_bytes(data_type: DataType) -> int:
    """Return the bytes per element; 4 for a string, which has a length prefix."""
    if data_type in (DataType.TYPE_INVALID, DataType.TYPE_BOOL):
        return 1
    if data_type is DataType.TYPE_STRING:
        return 4
    return int(data_type.name[-2:].lstrip("T")) // 8


class Format(IntEnum):
    FORMAT_NONE = 0
    FORMAT_NHWC = 1
    FORMAT_NCHW = 2


class InstanceKind(IntEnum):
    KIND_AUTO = 0
    KIND_GPU = 1
    KIND_CPU = 2
    KIND_MODEL = 3


class SecondaryDeviceKind(IntEnum):
    KIND_NVDLA = 0


class BatchInputKind(IntEnum):
    BATCH_ELEMENT_COUNT = 0
    BATCH_ACCUMULATED_ELEMENT_COUNT = 1
    BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO = 2
    BATCH_MAX_ELEMENT_COUNT_AS_SHAPE = 3
    BATCH_ITEM_SHAPE = 4
    BATCH_ITEM_SHAPE_FLATTEN = 5


class BatchOutputKind(IntEnum):
    BATCH_SCATTER_WITH_INPUT_SHAPE = 0


class ModelPriority(IntEnum):
    PRIORITY_DEFAULT = 0
    PRIORITY_MAX = 1
    PRIORITY_MIN = 2


class TimeoutAction(IntEnum):
    REJECT = 0
    DELAY = 1


class ControlKind(IntEnum):
    CONTROL_SEQUENCE_START = 0
    CONTROL_SEQUENCE_READY = 1
    CONTROL_SEQUENCE_END = 2
    CONTROL_SEQUENCE_CORRID = 3
