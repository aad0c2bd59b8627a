/* Tensors between pages that nobody may touch: an access out of bounds ends the process.

   Preloaded, it takes the place of posix_memalign, by which torch allocates, from guard_begin on.
   Every allocation lies alone on its pages, at their end or at their beginning, with an
   inaccessible page on both sides; freed pages stay inaccessible and are never used again. What
   is left of the pages holds a pattern, which is checked when the memory is freed. */

#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096ul
#define REGION (1ul << 37)
#define FINEST_ALIGNMENT 8ul

extern void __libc_free(void *);
extern void *__libc_memalign(size_t, size_t);

struct entry {
    uint32_t offset; /* of the allocation in its first page */
    uint32_t pages;
    uint64_t size : 56;
    uint64_t pattern : 8;
};

static unsigned char *region;
static struct entry *entries;
static size_t next_page;
static size_t most_bytes;
static int at_end, fill, active;

int guard_begin(size_t most) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    most_bytes = most;
    region = mmap(NULL, REGION, PROT_NONE, flags, -1, 0);
    entries = mmap(NULL, REGION / PAGE * sizeof *entries, PROT_READ | PROT_WRITE, flags, -1, 0);
    active = region != MAP_FAILED && entries != MAP_FAILED;
    return active;
}

void guard_place(int end, int pattern) {
    at_end = end;
    fill = pattern;
}

static void broken(void) {
    static const char text[] = "guarded memory: a write beside an allocation\n";
    if (write(2, text, sizeof text - 1)) {}
    abort();
}

static void check(const unsigned char *at, const unsigned char *end, unsigned pattern) {
    for (; at < end; at++)
        if (*at != pattern) broken();
}

int posix_memalign(void **found, size_t alignment, size_t size) {
    if (!active) {
        *found = __libc_memalign(alignment, size);
        return *found ? 0 : ENOMEM;
    }
    size_t pages = (size + PAGE - 1) / PAGE + (size == 0);
    if (size > most_bytes || alignment > PAGE) return ENOMEM;
    size_t first = __atomic_fetch_add(&next_page, pages + 1, __ATOMIC_RELAXED) + 1;
    if ((first + pages + 1) * PAGE > REGION) return ENOMEM;
    unsigned char *begin = region + first * PAGE;
    if (mprotect(begin, pages * PAGE, PROT_READ | PROT_WRITE)) return ENOMEM;
    memset(begin, fill, pages * PAGE);
    size_t fine = alignment == 64 ? FINEST_ALIGNMENT : alignment;
    size_t offset = at_end ? (pages * PAGE - size) / fine * fine : 0;
    entries[first] = (struct entry){(uint32_t)offset, (uint32_t)pages, size, (uint8_t)fill};
    *found = begin + offset;
    return 0;
}

void free(void *given) {
    unsigned char *address = given;
    if (!active || address < region || address >= region + REGION) {
        __libc_free(given);
        return;
    }
    size_t first = (size_t)(address - region) / PAGE;
    struct entry entry = entries[first];
    unsigned char *begin = region + first * PAGE, *end = begin + entry.pages * PAGE;
    if (!entry.pages || begin + entry.offset != address) broken();
    check(begin, address, entry.pattern);
    check(address + entry.size, end, entry.pattern);
    entries[first].pages = 0;
    mprotect(begin, entry.pages * PAGE, PROT_NONE);
    madvise(begin, entry.pages * PAGE, MADV_DONTNEED);
}
