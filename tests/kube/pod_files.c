/* A pod's mounts, for processes that share this machine's files: preloaded into every process of a container.
 *
 * $KUBE_MOUNTS has a line "mount-path real-path" for each mount, the longest first. Every call of libc with a path at or
 * below a mount path goes to the real one instead. Paths that the kernel gives back are real ones.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define REAL(type, name) ((type)dlsym(RTLD_NEXT, name))

static const char *place(const char *path, char *buffer)
{
    const char *line = getenv("KUBE_MOUNTS");

    if (line == NULL || path == NULL || path[0] != '/')
        return path;
    while (*line != '\0') {
        const char *space = strchr(line, ' '), *end = strchrnul(line, '\n');
        size_t length = (size_t)(space - line);
        if (strncmp(path, line, length) == 0 && (path[length] == '/' || path[length] == '\0')) {
            int written = snprintf(buffer, PATH_MAX, "%.*s%s", (int)(end - space - 1), space + 1, path + length);
            return written > 0 && written < PATH_MAX ? buffer : path;
        }
        line = *end == '\0' ? end : end + 1;
    }
    return path;
}

/* Functions whose first argument is the path, and those whose second one is. */
#define FIRST(type, name, parameters, types, arguments)                                                                \
    type name parameters                                                                                               \
    {                                                                                                                  \
        char buffer[PATH_MAX];                                                                                         \
        path = place(path, buffer);                                                                                    \
        return REAL(type(*) types, #name) arguments;                                                                   \
    }

#define STAT(name, status)                                                                                             \
    FIRST(int, name, (const char *path, struct status *found), (const char *, struct status *), (path, found))
#define OLD_STAT(name, status)                                                                                         \
    int name(int version, const char *path, struct status *found);                                                     \
    FIRST(int, name, (int version, const char *path, struct status *found), (int, const char *, struct status *),      \
          (version, path, found))
#define AT_STAT(name, status)                                                                                          \
    FIRST(int, name, (int at, const char *path, struct status *found, int flags),                                      \
          (int, const char *, struct status *, int), (at, path, found, flags))
#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...)                                                                         \
    {                                                                                                                  \
        char buffer[PATH_MAX];                                                                                         \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                        \
        va_end(rest);                                                                                                  \
        return REAL(int (*)(const char *, int, ...), #name)(place(path, buffer), flags, mode);                         \
    }
#define OPEN_AT(name)                                                                                                  \
    int name(int at, const char *path, int flags, ...)                                                                 \
    {                                                                                                                  \
        char buffer[PATH_MAX];                                                                                         \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                        \
        va_end(rest);                                                                                                  \
        return REAL(int (*)(int, const char *, int, ...), #name)(at, place(path, buffer), flags, mode);                \
    }
#define CHECKED_OPEN(name)                                                                                             \
    int name(const char *path, int flags);                                                                             \
    FIRST(int, name, (const char *path, int flags), (const char *, int), (path, flags))

OPEN(open)
OPEN(open64)
OPEN_AT(openat)
OPEN_AT(openat64)
CHECKED_OPEN(__open_2)
CHECKED_OPEN(__open64_2)
FIRST(FILE *, fopen, (const char *path, const char *mode), (const char *, const char *), (path, mode))
FIRST(FILE *, fopen64, (const char *path, const char *mode), (const char *, const char *), (path, mode))
FIRST(DIR *, opendir, (const char *path), (const char *), (path))

STAT(stat, stat)
STAT(stat64, stat64)
STAT(lstat, stat)
STAT(lstat64, stat64)
OLD_STAT(__xstat, stat)
OLD_STAT(__xstat64, stat64)
OLD_STAT(__lxstat, stat)
OLD_STAT(__lxstat64, stat64)
AT_STAT(fstatat, stat)
AT_STAT(fstatat64, stat64)
FIRST(int, statx, (int at, const char *path, int flags, unsigned mask, struct statx *found),
      (int, const char *, int, unsigned, struct statx *), (at, path, flags, mask, found))

FIRST(int, access, (const char *path, int mode), (const char *, int), (path, mode))
FIRST(int, faccessat, (int at, const char *path, int mode, int flags), (int, const char *, int, int),
      (at, path, mode, flags))
FIRST(ssize_t, readlink, (const char *path, char *found, size_t size), (const char *, char *, size_t),
      (path, found, size))
FIRST(char *, realpath, (const char *path, char *found), (const char *, char *), (path, found))
FIRST(int, mkdir, (const char *path, mode_t mode), (const char *, mode_t), (path, mode))
FIRST(int, rmdir, (const char *path), (const char *), (path))
FIRST(int, unlink, (const char *path), (const char *), (path))
FIRST(int, chdir, (const char *path), (const char *), (path))
FIRST(int, chmod, (const char *path, mode_t mode), (const char *, mode_t), (path, mode))
FIRST(int, truncate, (const char *path, off_t size), (const char *, off_t), (path, size))
FIRST(int, execv, (const char *path, char *const words[]), (const char *, char *const *), (path, words))
FIRST(int, execve, (const char *path, char *const words[], char *const env[]),
      (const char *, char *const *, char *const *), (path, words, env))

int rename(const char *from, const char *to)
{
    char from_buffer[PATH_MAX], to_buffer[PATH_MAX];

    return REAL(int (*)(const char *, const char *), "rename")(place(from, from_buffer), place(to, to_buffer));
}

int symlink(const char *target, const char *link)
{
    char target_buffer[PATH_MAX], link_buffer[PATH_MAX];

    return REAL(int (*)(const char *, const char *), "symlink")(place(target, target_buffer), place(link, link_buffer));
}
