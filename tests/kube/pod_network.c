/* A pod's network, for processes that share this machine's: preloaded into every process of a stand-in pod.
 *
 * - What is bound to every address is bound to the pod's own ($KUBE_POD_IP); IPv6 alone is not available.
 * - 127.0.0.1 at a port on which this pod listens is the pod; elsewhere it is the machine, as for UCX's own addresses.
 * - Names are looked up in $KUBE_HOSTS_FILE (lines of "address name") before anywhere else.
 * - The host's name is the pod's ($HOSTNAME), and its way out to other networks starts at the pod's address.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/utsname.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int pod_address(struct in_addr *address)
{
    const char *text = getenv("KUBE_POD_IP");
    return text != NULL && inet_pton(AF_INET, text, address) == 1;
}

static int bind_to_pod_v6(int fd, const struct sockaddr *wanted, socklen_t length, struct in_addr pod)
{
    struct sockaddr_in6 address;
    int v6_only = 0;
    socklen_t size = sizeof v6_only;

    memcpy(&address, wanted, sizeof address);
    if (!IN6_IS_ADDR_UNSPECIFIED(&address.sin6_addr))
        return REAL(bind)(fd, wanted, length);
    getsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &v6_only, &size);
    if (v6_only) {
        errno = EADDRNOTAVAIL;
        return -1;
    }
    memset(&address.sin6_addr, 0, sizeof address.sin6_addr);
    address.sin6_addr.s6_addr[10] = address.sin6_addr.s6_addr[11] = 0xff;
    memcpy(&address.sin6_addr.s6_addr[12], &pod, sizeof pod);
    return REAL(bind)(fd, (struct sockaddr *)&address, sizeof address);
}

int bind(int fd, const struct sockaddr *wanted, socklen_t length)
{
    struct sockaddr_in address;
    struct in_addr pod;

    if (!pod_address(&pod))
        return REAL(bind)(fd, wanted, length);
    if (wanted->sa_family == AF_INET6 && length >= sizeof(struct sockaddr_in6))
        return bind_to_pod_v6(fd, wanted, length, pod);
    if (wanted->sa_family != AF_INET || length < sizeof address)
        return REAL(bind)(fd, wanted, length);
    memcpy(&address, wanted, sizeof address);
    if (address.sin_addr.s_addr == htonl(INADDR_ANY))
        address.sin_addr = pod;
    return REAL(bind)(fd, (struct sockaddr *)&address, length);
}

/* Whether some process listens at the pod's address: then it cannot be bound once more. */
static int is_taken(struct sockaddr_in address)
{
    int saved = errno;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int taken = fd >= 0 && REAL(bind)(fd, (struct sockaddr *)&address, sizeof address) != 0 && errno == EADDRINUSE;

    if (fd >= 0)
        close(fd);
    errno = saved;
    return taken;
}

/* Finding out one's own address by connecting a datagram socket to somewhere outside. */
static void leave_from_pod(int fd, struct sockaddr_in *address, struct in_addr pod)
{
    struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr = pod};

    if (REAL(bind)(fd, (struct sockaddr *)&own, sizeof own) == 0)
        address->sin_addr = pod;
}

int connect(int fd, const struct sockaddr *wanted, socklen_t length)
{
    struct sockaddr_in address;
    struct in_addr pod;
    int type = 0;
    socklen_t size = sizeof type;

    if (wanted->sa_family != AF_INET || length < sizeof address || !pod_address(&pod))
        return REAL(connect)(fd, wanted, length);
    memcpy(&address, wanted, sizeof address);
    getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size);
    if (type == SOCK_DGRAM && ntohl(address.sin_addr.s_addr) >> 24 != IN_LOOPBACKNET) {
        leave_from_pod(fd, &address, pod);
    } else if (address.sin_addr.s_addr == htonl(INADDR_LOOPBACK)) {
        struct sockaddr_in here = address;
        here.sin_addr = pod;
        if (is_taken(here))
            address = here;
    }
    return REAL(connect)(fd, (struct sockaddr *)&address, length);
}

/* Appends what the address in `line` resolves to. */
static int add_address(const char *line, const char *service, const struct addrinfo *hints, struct addrinfo **list)
{
    struct addrinfo *found = NULL;
    int status = REAL(getaddrinfo)(line, service, hints, &found);

    if (status != 0)
        return status;
    while (*list != NULL)
        list = &(*list)->ai_next;
    *list = found;
    return 0;
}

static int look_up(const char *name, const char *service, const struct addrinfo *hints, struct addrinfo **list)
{
    const char *path = getenv("KUBE_HOSTS_FILE"), *own_name = getenv("HOSTNAME"), *own = getenv("KUBE_POD_IP");
    char address[64], host[256];
    int status = 0;
    FILE *file;

    if (own != NULL && own_name != NULL && strcmp(name, own_name) == 0)
        return add_address(own, service, hints, list);
    if (path == NULL || (file = fopen(path, "re")) == NULL)
        return 0;
    while (status == 0 && fscanf(file, "%63s %255s", address, host) == 2)
        if (strcmp(host, name) == 0)
            status = add_address(address, service, hints, list);
    fclose(file);
    return status;
}

int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints, struct addrinfo **result)
{
    struct addrinfo *list = NULL;

    if (name != NULL) {
        int status = look_up(name, service, hints, &list);
        if (status != 0 || list != NULL) {
            *result = list;
            return status;
        }
    }
    return REAL(getaddrinfo)(name, service, hints, result);
}

int gethostname(char *name, size_t length)
{
    const char *own_name = getenv("HOSTNAME");

    if (own_name == NULL || strlen(own_name) >= length)
        return REAL(gethostname)(name, length);
    strcpy(name, own_name);
    return 0;
}

int uname(struct utsname *about)
{
    const char *own_name = getenv("HOSTNAME");
    int status = REAL(uname)(about);

    if (status == 0 && own_name != NULL && strlen(own_name) < sizeof about->nodename)
        strcpy(about->nodename, own_name);
    return status;
}
