// What pynvml (NVIDIA's own, and the one inside vLLM) asks of libnvidia-ml.so.1, answered for PRETENDED_GPUS GPUs that are not there.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;

static unsigned long long number(const char *name, unsigned long long otherwise) {
    const char *value = getenv(name);
    return value ? strtoull(value, NULL, 10) : otherwise;
}

int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int result) { return "pretended"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = number("PRETENDED_GPUS", 0); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (index >= number("PRETENDED_GPUS", 0)) return 2;
    *device = (void *)(size_t)(index + 1);
    return 0;
}
int nvmlDeviceGetIndex(void *device, unsigned *index) { *index = (size_t)device - 1; return 0; }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    snprintf(uuid, length, "GPU-%08zu-0000-4000-8000-000000000000", (size_t)device - 1);
    return 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    for (size_t index = 0; index < number("PRETENDED_GPUS", 0); index++) {
        char own[80];
        nvmlDeviceGetUUID((void *)(index + 1), own, sizeof own);
        if (!strcmp(own, uuid)) { *device = (void *)(index + 1); return 0; }
    }
    return 6;
}
int nvmlDeviceGetName(void *device, char *name, unsigned length) { snprintf(name, length, "Pretended H100"); return 0; }
int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    memory->total = number("PRETENDED_BYTES", 80ull << 30);
    memory->free = number("PRETENDED_FREE_BYTES", memory->total);
    memory->used = memory->total - memory->free;
    return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void *device, memory_v2_t *memory) {
    memory_t plain;
    nvmlDeviceGetMemoryInfo(device, &plain);
    memory->total = plain.total, memory->free = plain.free, memory->used = plain.used, memory->reserved = 0;
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
int nvmlSystemGetDriverVersion(char *version, unsigned length) { snprintf(version, length, "580.00"); return 0; }
