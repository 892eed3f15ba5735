/* Records what a process asks of the file system under one directory, for tests of power cuts.

   Preloaded (LD_PRELOAD), with TRACED the directory and TRACE a file that exists. Each call that
   succeeds is one record: a line "<letter> <number> <number> <path or new path>\0<other path>\n",
   followed by the bytes of a write. Shared memory of SQLite (-shm) is left out: it is rebuilt. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))real(#name))

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static int trace = -1;
static const char *traced = "";

static void *real(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found) abort();
    return found;
}

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("TRACE");
    if (path && getenv("TRACED")) {
        traced = getenv("TRACED");
        trace = REAL(open)(path, O_WRONLY | O_APPEND | O_CLOEXEC);
    }
}

static int is_traced(const char *path) {
    size_t n = strlen(path), m = strlen(traced);
    int is_shared_memory = n > 4 && !strcmp(path + n - 4, "-shm");
    int is_under = !strncmp(path, traced, m) && (path[m] == '/' || !path[m]);
    return trace >= 0 && is_under && !is_shared_memory;
}

/* The absolute path of a name in a directory. */
static const char *whole(int directory, const char *path, char *out) {
    char link[64];
    ssize_t n = 0;
    if (path[0] == '/') return path;
    if (directory == AT_FDCWD) {
        if (!getcwd(out, PATH_MAX)) return path;
        n = strlen(out);
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
        n = readlink(link, out, PATH_MAX - 1);
        if (n < 0) return path;
    }
    snprintf(out + n, PATH_MAX - n, "/%s", path);
    return out;
}

static const char *path_of(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, out, PATH_MAX - 1);
    out[n < 0 ? 0 : n] = 0;
    return out;
}

static void record(char letter, long a, long b, const char *path, const char *other,
                   const struct iovec *data, int n_data) {
    char head[2 * PATH_MAX + 64];
    struct iovec all[1 + IOV_MAX];
    int n = snprintf(head, sizeof head, "%c %ld %ld %s", letter, a, b, path) + 1;
    n += snprintf(head + n, sizeof head - n, "%s\n", other);
    all[0] = (struct iovec){head, n};
    memcpy(all + 1, data, n_data * sizeof *data);
    if (REAL(writev)(trace, all, 1 + n_data) < n) abort();
}

static long inode(int fd) {
    struct stat about;
    return fstat(fd, &about) ? 0 : (long)about.st_ino;
}

static int opened(int fd, const char *path, int is_new, int flags) {
    if (fd >= 0 && is_new) record('O', inode(fd), 0, path, "", 0, 0);
    if (fd >= 0 && !is_new && flags & O_TRUNC) record('T', inode(fd), 0, path, "", 0, 0);
    return fd;
}

static int traced_open(const char *name, int directory, const char *path, int flags, int mode) {
    char buffer[PATH_MAX];
    int is_missing, fd, error;
    __typeof__(&openat) call = real(name);
    const char *all = whole(directory, path, buffer);
    if (!is_traced(all)) return call(directory, path, flags, mode);
    pthread_mutex_lock(&lock);
    is_missing = access(all, F_OK) != 0;
    fd = opened(call(directory, path, flags, mode), all, is_missing && flags & O_CREAT, flags);
    error = errno;
    pthread_mutex_unlock(&lock);
    errno = error;
    return fd;
}

#define MODE(flags, mode) va_list rest; va_start(rest, flags); \
    int mode = (flags) & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0; va_end(rest)

int open(const char *path, int flags, ...) {
    MODE(flags, mode);
    return traced_open("openat", AT_FDCWD, path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    MODE(flags, mode);
    return traced_open("openat64", AT_FDCWD, path, flags, mode);
}
int openat(int directory, const char *path, int flags, ...) {
    MODE(flags, mode);
    return traced_open("openat", directory, path, flags, mode);
}
int openat64(int directory, const char *path, int flags, ...) {
    MODE(flags, mode);
    return traced_open("openat64", directory, path, flags, mode);
}

/* After `done` bytes of these were written at an offset. */
static ssize_t wrote(int fd, off_t at, ssize_t done, const struct iovec *data, int n_data) {
    char path[PATH_MAX];
    struct iovec taken[IOV_MAX];
    ssize_t left = done;
    int n = 0;
    for (; n < n_data && left > 0; n++) {
        taken[n] = data[n];
        if ((ssize_t)taken[n].iov_len > left) taken[n].iov_len = left;
        left -= taken[n].iov_len;
    }
    if (done > 0) {
        record('W', inode(fd), (long)at, path_of(fd, path), "", 0, 0);
        char size[32];
        int n_size = snprintf(size, sizeof size, "%ld\n", (long)done);
        REAL(write)(trace, size, n_size);
        REAL(writev)(trace, taken, n);
    }
    return done;
}

static off_t place(int fd) {
    struct stat about;
    if (fcntl(fd, F_GETFL) & O_APPEND) return fstat(fd, &about) ? 0 : about.st_size;
    return lseek(fd, 0, SEEK_CUR);
}

#define TRACED_CALL(fd, type, before, call, after) \
    char traced_path[PATH_MAX]; \
    if (trace < 0 || (fd) == trace || !is_traced(path_of(fd, traced_path))) return call; \
    pthread_mutex_lock(&lock); \
    before; \
    type done = call; \
    int error = errno; \
    after; \
    pthread_mutex_unlock(&lock); \
    errno = error; \
    return done

ssize_t write(int fd, const void *data, size_t n) {
    struct iovec one = {(void *)data, n};
    TRACED_CALL(fd, ssize_t, off_t at = place(fd), REAL(write)(fd, data, n), wrote(fd, at, done, &one, 1));
}
ssize_t writev(int fd, const struct iovec *data, int n) {
    TRACED_CALL(fd, ssize_t, off_t at = place(fd), REAL(writev)(fd, data, n), wrote(fd, at, done, data, n));
}
ssize_t pwrite(int fd, const void *data, size_t n, off_t at) {
    struct iovec one = {(void *)data, n};
    TRACED_CALL(fd, ssize_t, , REAL(pwrite)(fd, data, n, at), wrote(fd, at, done, &one, 1));
}
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) {
    struct iovec one = {(void *)data, n};
    TRACED_CALL(fd, ssize_t, , REAL(pwrite64)(fd, data, n, at), wrote(fd, at, done, &one, 1));
}
int ftruncate(int fd, off_t size) {
    TRACED_CALL(fd, int, , REAL(ftruncate)(fd, size),
                if (!done) record('T', inode(fd), size, traced_path, "", 0, 0));
}
int ftruncate64(int fd, off64_t size) {
    TRACED_CALL(fd, int, , REAL(ftruncate64)(fd, size),
                if (!done) record('T', inode(fd), size, traced_path, "", 0, 0));
}
int fsync(int fd) {
    TRACED_CALL(fd, int, , REAL(fsync)(fd), if (!done) record('S', inode(fd), 0, traced_path, "", 0, 0));
}
int fdatasync(int fd) {
    TRACED_CALL(fd, int, , REAL(fdatasync)(fd), if (!done) record('S', inode(fd), 0, traced_path, "", 0, 0));
}

#define NAMED_CALL(letter, path, other, call, number) \
    if (!is_traced(path)) return call; \
    pthread_mutex_lock(&lock); \
    int done = call; \
    int error = errno; \
    if (!done) record(letter, number, 0, path, other, 0, 0); \
    pthread_mutex_unlock(&lock); \
    errno = error; \
    return done

int renameat(int from, const char *old, int to, const char *new) {
    char a[PATH_MAX], b[PATH_MAX];
    const char *before = whole(from, old, a), *after = whole(to, new, b);
    NAMED_CALL('R', before, after, REAL(renameat)(from, old, to, new), 0);
}
int rename(const char *old, const char *new) { return renameat(AT_FDCWD, old, AT_FDCWD, new); }
int unlinkat(int directory, const char *name, int flags) {
    char a[PATH_MAX];
    const char *path = whole(directory, name, a);
    NAMED_CALL('U', path, "", REAL(unlinkat)(directory, name, flags), 0);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int mkdirat(int directory, const char *name, mode_t mode) {
    char a[PATH_MAX];
    const char *path = whole(directory, name, a);
    NAMED_CALL('M', path, "", REAL(mkdirat)(directory, name, mode), 0);
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
