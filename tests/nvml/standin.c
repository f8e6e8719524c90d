/* A stand-in for libnvidia-ml.so.1 under the real nvidia-ml-py: as much of it as yatt calls.
 *
 * The devices are folders $NVML_STANDIN/gpu0, gpu1, ...; a file named by a pid holds the bytes that
 * process has on the device, and counts only while that process lives, as with the real driver. Other
 * files: "base" and "leak": bytes that belong to nobody; "stuck-PID": listed whether PID lives or not;
 * "lost": the GPU has fallen off the bus; "pending", "failed": rows of its memory wait for a reset, or could
 * not be repaired; "slow": bits that say why its clocks are held back. A file "silent" in $NVML_STANDIN hides
 * whose bytes are whose; "old" takes functions away that old drivers do not have.
 */
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15 };

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu, compute; } process_t;
typedef struct { char folder[512]; } device_t;
typedef struct { char legacy[16]; unsigned int domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;

static device_t devices[16];

static unsigned long long number_in(const char *folder, const char *name) {
    char path[1024];
    unsigned long long value = 0;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    if (fscanf(file, "%llu", &value) != 1) value = 0;
    fclose(file);
    return value;
}

static int exists(const char *folder, const char *name) {
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return access(path, F_OK) == 0;
}

/* Calls for each process on the device; returns how many there are, and the sum of their bytes. */
static unsigned int each(device_t *device, process_t *out, unsigned int room, unsigned long long *sum) {
    unsigned int count = 0;
    DIR *folder = opendir(device->folder);
    struct dirent *entry;
    while (folder && (entry = readdir(folder))) {
        int stuck = strncmp(entry->d_name, "stuck-", 6) == 0;
        char *end;
        long pid = strtol(entry->d_name + (stuck ? 6 : 0), &end, 10);
        if (*end || pid <= 0 || (!stuck && kill((pid_t)pid, 0) != 0)) continue;
        unsigned long long used = number_in(device->folder, entry->d_name);
        if (!used) continue;
        *sum += used;
        if (out && count < room) {
            int silent = exists(getenv("NVML_STANDIN"), "silent");
            out[count] = (process_t){(unsigned int)pid, silent ? ~0ULL : used, 0, 0};
        }
        count++;
    }
    if (folder) closedir(folder);
    return count;
}

int nvmlInitWithFlags(unsigned int flags) { (void)flags; return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == GPU_IS_LOST ? "GPU is lost" : "Not Found"; }

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, device_t **device) {
    const char *root = getenv("NVML_STANDIN");
    if (!root || index >= 16) return INVALID_ARGUMENT;
    snprintf(devices[index].folder, sizeof devices[index].folder, "%s/gpu%u", root, index);
    if (access(devices[index].folder, F_OK) != 0) return NOT_FOUND;
    *device = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, device_t **device) {
    unsigned int index;
    if (sscanf(uuid, "GPU-%u", &index) != 1) return NOT_FOUND;
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

int nvmlDeviceGetMemoryInfo(device_t *device, memory_t *memory) {
    unsigned long long used = number_in(device->folder, "base") + number_in(device->folder, "leak");
    if (exists(device->folder, "lost")) return GPU_IS_LOST;
    each(device, NULL, 0, &used);
    *memory = (memory_t){80ULL << 30, (80ULL << 30) - used, used};
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(device_t *device, unsigned int *count, process_t *out) {
    unsigned long long sum = 0;
    unsigned int room = out ? *count : 0;
    *count = each(device, out, room, &sum);
    return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}

/* GPU i is device 0 of bus i + 1. */
int nvmlDeviceGetPciInfo_v3(device_t *device, pci_t *pci) {
    if (exists(device->folder, "lost")) return GPU_IS_LOST;
    memset(pci, 0, sizeof *pci);
    pci->bus = (unsigned int)(device - devices) + 1;
    return SUCCESS;
}

int nvmlDeviceGetRemappedRows(device_t *device, unsigned *correctable, unsigned *uncorrectable,
                              unsigned *pending, unsigned *failed) {
    if (exists(getenv("NVML_STANDIN"), "old")) return NOT_SUPPORTED;
    *correctable = *uncorrectable = 0;
    *pending = (unsigned)exists(device->folder, "pending");
    *failed = (unsigned)exists(device->folder, "failed");
    return SUCCESS;
}

int nvmlDeviceGetRetiredPagesPendingStatus(device_t *device, unsigned *pending) {
    if (!exists(getenv("NVML_STANDIN"), "old")) return NOT_SUPPORTED;
    *pending = (unsigned)exists(device->folder, "pending");
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(device_t *device, unsigned long long *reasons) {
    *reasons = number_in(device->folder, "slow");
    return SUCCESS;
}
