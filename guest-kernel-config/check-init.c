// PID 1 of `check`: asks the running kernel for every feature Thaw relies on, by using it where that needs no device,
// and prints one line for each: "ok NAME" or "MISSING NAME: reason". Ends with "checked N missing M" and a reset.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/bpf.h>
#include <linux/filter.h>
#include <linux/if_packet.h>
#include <linux/inet_diag.h>
#include <linux/io_uring.h>
#include <linux/keyctl.h>
#include <linux/membarrier.h>
#include <linux/netlink.h>
#include <linux/seccomp.h>
#include <mqueue.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/fanotify.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/reboot.h>
#include <sys/shm.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x00000080
#endif

static int checked, missing;

static void report(int ok, const char *name, const char *why) {
    checked++;
    missing += !ok;
    if (ok)
        printf("ok %s\n", name);
    else
        printf("MISSING %s: %.*s\n", name, (int)strcspn(why, "\n"), why);
}

// A call that must not fail.
static int want(const char *name, long result) {
    report(result >= 0, name, strerror(errno));
    return (int)result;
}

// A call whose only purpose is to be there: any answer but ENOSYS will do.
static void known(const char *name, long result) { report(result >= 0 || errno != ENOSYS, name, strerror(errno)); }

static const char *file_text(const char *path) {
    static char text[1 << 16];
    int fd = open(path, O_RDONLY);
    size_t n = 0;
    ssize_t got;
    while (fd >= 0 && n < sizeof text - 1 && (got = read(fd, text + n, sizeof text - 1 - n)) > 0) n += (size_t)got;
    text[n] = 0;
    if (fd >= 0) close(fd);
    return text;
}

// Whether `word` stands in `text` between separators.
static int has_word(const char *text, const char *word) {
    size_t n = strlen(word);
    for (const char *p = text; (p = strstr(p, word)); p += n)
        if ((p == text || strchr(" \t\n", p[-1])) && strchr(" \t\n", p[n])) return 1;
    return 0;
}

static void words(const char *kind, const char *path, const char *const *list) {
    char name[128];
    for (; *list; list++) {
        snprintf(name, sizeof name, "%s %s", kind, *list);
        report(has_word(file_text(path), *list), name, path);
    }
}

static void paths(const char *kind, const char *folder, const char *const *list) {
    char name[128], path[256];
    for (; *list; list++) {
        snprintf(name, sizeof name, "%s %s", kind, *list);
        snprintf(path, sizeof path, "%s/%s", folder, *list);
        report(access(path, F_OK) == 0, name, path);
    }
}

// Whether the kernel has a function of this name: for code that only a device would reach.
static int has_function(const char *name) {
    char line[512], wanted[64];
    int found = 0;
    snprintf(wanted, sizeof wanted, " %s\n", name);
    FILE *symbols = fopen("/proc/kallsyms", "r");
    while (symbols && !found && fgets(line, sizeof line, symbols)) found = strstr(line, wanted) != NULL;
    if (symbols) fclose(symbols);
    return found;
}

static int write_text(const char *path, const char *text) {
    int fd = open(path, O_WRONLY);
    if (fd < 0) return -1;
    ssize_t n = write(fd, text, strlen(text));
    close(fd);
    return n < 0 ? -1 : 0;
}

// Runs `body` in a child of its own, since it changes or ends the process; its status must be 0.
static void in_child(const char *name, int (*body)(void)) {
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(10);
        _exit(body() == 0 ? 0 : (errno ? errno : 255));
    }
    int status = 0;
    waitpid(pid, &status, 0);
    char why[64];
    if (WIFEXITED(status))
        snprintf(why, sizeof why, "%s", strerror(WEXITSTATUS(status)));
    else
        snprintf(why, sizeof why, "signal %d", WTERMSIG(status));
    report(status == 0, name, why);
}

static void mounts(void) {
    want("mount tmpfs", mount("t", "/t", "tmpfs", 0, "size=16m"));
    mkdir("/t/h", 0755);
    mkdir("/t/q", 0755);
    mkdir("/t/p", 0755);
    mkdir("/t/b", 0755);
    mkdir("/t/e", 0755);
    mkdir("/t/o", 0755);
    want("mount sysfs", mount("s", "/sys", "sysfs", 0, NULL));
    want("mount cgroup2", mount("c", "/sys/fs/cgroup", "cgroup2", 0, NULL));
    want("mount hugetlbfs", mount("h", "/t/h", "hugetlbfs", 0, NULL));
    want("mount mqueue", mount("q", "/t/q", "mqueue", 0, NULL));
    want("mount devpts", mount("p", "/t/p", "devpts", 0, "newinstance,ptmxmode=0666"));
    want("mount binfmt_misc", mount("b", "/t/b", "binfmt_misc", 0, NULL));
    want("mount ext4", mount("/dev/vdb", "/t/e", "ext4", 0, NULL));
    mkdir("/t/e/u", 0755);
    mkdir("/t/e/w", 0755);
    want("mount overlay (erofs below, ext4 above)",
         mount("o", "/t/o", "overlay", 0, "lowerdir=/,upperdir=/t/e/u,workdir=/t/e/w"));
    int fd = want("write through overlay", open("/t/o/written", O_CREAT | O_WRONLY, 0644));
    if (fd >= 0) close(fd);
    // No such tag is EINVAL; no such file system would be ENODEV.
    int r = mount("no-such-tag", "/t/h", "virtiofs", 0, NULL);
    report(r < 0 && errno == EINVAL, "mount virtiofs (refused: no such tag)", strerror(errno));
    want("open /dev/fuse", open("/dev/fuse", O_RDWR));
    want("open /t/p/ptmx", open("/t/p/ptmx", O_RDWR | O_NOCTTY));
}

// user::rw-, user:1:r--, group::r--, mask::r--, other::r-- as the kernel's binary form (linux/posix_acl_xattr.h).
static const uint8_t acl[] = {2, 0, 0, 0,
                              1,    0, 6, 0, 255, 255, 255, 255, 2,    0, 4, 0, 1,   0,   0,   0,
                              4,    0, 4, 0, 255, 255, 255, 255, 0x10, 0, 4, 0, 255, 255, 255, 255,
                              0x20, 0, 4, 0, 255, 255, 255, 255};
// cap_net_bind_service, effective and permitted, revision 2.
static const uint8_t capability[] = {1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};

static void xattrs(const char *fs, const char *file) {
    char name[64];
    int fd = open(file, O_CREAT | O_WRONLY, 0644);
    if (fd >= 0) close(fd);
    snprintf(name, sizeof name, "POSIX ACL on %s", fs);
    want(name, setxattr(file, "system.posix_acl_access", acl, sizeof acl, 0));
    snprintf(name, sizeof name, "file capabilities on %s", fs);
    want(name, setxattr(file, "security.capability", capability, sizeof capability, 0));
    snprintf(name, sizeof name, "trusted xattr on %s", fs);
    want(name, setxattr(file, "trusted.t", "v", 1, 0));
}

static int seccomp_filter(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getppid, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EXDEV),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return -1;
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program)) return -1;
    return syscall(SYS_getppid) == -1 && errno == EXDEV ? 0 : -1;
}

static int namespaces(void) {
    return unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET |
                   CLONE_NEWCGROUP | CLONE_NEWTIME);
}

// A BPF program that lets every device through, attached as a container runtime attaches its own.
static int cgroup_device(void) {
    struct bpf_insn code[] = {{.code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = 0, .imm = 1}, {.code = BPF_JMP | BPF_EXIT}};
    union bpf_attr load = {.prog_type = BPF_PROG_TYPE_CGROUP_DEVICE};
    load.insns = (uint64_t)(uintptr_t)code;
    load.insn_cnt = 2;
    load.license = (uint64_t)(uintptr_t) "GPL";
    int program = (int)syscall(SYS_bpf, BPF_PROG_LOAD, &load, sizeof load);
    if (program < 0) return -1;
    mkdir("/sys/fs/cgroup/d", 0755);
    int group = open("/sys/fs/cgroup/d", O_RDONLY | O_DIRECTORY);
    union bpf_attr attach = {.target_fd = (uint32_t)group};
    attach.attach_bpf_fd = (uint32_t)program;
    attach.attach_type = BPF_CGROUP_DEVICE;
    return (int)syscall(SYS_bpf, BPF_PROG_ATTACH, &attach, sizeof attach);
}

// What the agent is told by of sockets that listen: a program for socket operations linked to a cgroup, and a ring.
static int cgroup_sockets(void) {
    union bpf_attr ring = {.map_type = BPF_MAP_TYPE_RINGBUF, .max_entries = 4096};
    if (syscall(SYS_bpf, BPF_MAP_CREATE, &ring, sizeof ring) < 0) return -1;
    struct bpf_insn code[] = {{.code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = 0, .imm = 1}, {.code = BPF_JMP | BPF_EXIT}};
    union bpf_attr load = {.prog_type = BPF_PROG_TYPE_SOCK_OPS};
    load.insns = (uint64_t)(uintptr_t)code;
    load.insn_cnt = 2;
    load.license = (uint64_t)(uintptr_t) "GPL";
    int program = (int)syscall(SYS_bpf, BPF_PROG_LOAD, &load, sizeof load);
    if (program < 0) return -1;
    mkdir("/sys/fs/cgroup/s", 0755);
    int group = open("/sys/fs/cgroup/s", O_RDONLY | O_DIRECTORY);
    union bpf_attr link = {.link_create.prog_fd = (uint32_t)program};
    link.link_create.target_fd = (uint32_t)group;
    link.link_create.attach_type = BPF_CGROUP_SOCK_OPS;
    return syscall(SYS_bpf, BPF_LINK_CREATE, &link, sizeof link) < 0 ? -1 : 0;
}

static int cgroup_files(void) {
    if (write_text("/sys/fs/cgroup/cgroup.subtree_control", "+cpuset +cpu +io +memory +hugetlb +pids")) return -1;
    mkdir("/sys/fs/cgroup/f", 0755);
    static const char *const files[] = {"cpu.max",       "cpu.weight", "cpuset.cpus",       "io.max",     "memory.max",
                                        "memory.events", "pids.max",   "memory.swap.max",   "cpu.stat",   "cgroup.freeze",
                                        "cgroup.kill",   "io.stat",    "hugetlb.2MB.max",   NULL};
    for (const char *const *f = files; *f; f++) {
        char path[128];
        snprintf(path, sizeof path, "/sys/fs/cgroup/f/%s", *f);
        if (access(path, F_OK)) {
            printf("note: no %s\n", path);
            return -1;
        }
    }
    return write_text("/sys/fs/cgroup/f/cpu.max", "50000 100000");
}

static void system_calls(void) {
    struct io_uring_params params = {0};
    want("io_uring", syscall(SYS_io_uring_setup, 4, &params));
    want("userfaultfd", syscall(SYS_userfaultfd, O_CLOEXEC));
    want("memfd", memfd_create("m", 0));
    want("memfd (hugetlb)", memfd_create("m", MFD_HUGETLB));
    want("membarrier", syscall(SYS_membarrier, MEMBARRIER_CMD_QUERY, 0, 0));
    // glibc has registered this thread already: EINVAL or EBUSY.
    known("rseq", syscall(SYS_rseq, NULL, 0, 0, 0));
    want("epoll", epoll_create1(0));
    want("eventfd", eventfd(0, 0));
    sigset_t none;
    sigemptyset(&none);
    want("signalfd", signalfd(-1, &none, 0));
    want("timerfd", timerfd_create(CLOCK_BOOTTIME, 0));
    want("inotify", inotify_init1(0));
    want("fanotify", fanotify_init(FAN_CLASS_NOTIF, O_RDONLY));
    struct sigevent quiet = {.sigev_notify = SIGEV_NONE};
    timer_t timer;
    want("POSIX timers", timer_create(CLOCK_MONOTONIC, &quiet, &timer));
    unsigned long aio = 0;
    want("AIO", syscall(SYS_io_setup, 4, &aio));
    struct { struct file_handle h; char bytes[128]; } handle = {.h.handle_bytes = 128};
    int mount_id;
    want("file handles", name_to_handle_at(AT_FDCWD, "/t/e", &handle.h, &mount_id, 0));
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    int file = open("/t/lock", O_CREAT | O_RDWR, 0600);
    want("file locks", fcntl(file, F_SETLK, &lock));
    want("kcmp", syscall(SYS_kcmp, getpid(), getpid(), 0, file, file));
    char from = 1, to = 0;
    struct iovec local = {&to, 1}, remote = {&from, 1};
    want("process_vm_readv", process_vm_readv(getpid(), &local, 1, &remote, 1, 0));
    want("SysV shared memory", shmget(IPC_PRIVATE, 4096, 0600));
    want("POSIX message queues", mq_open("/q", O_CREAT | O_RDWR, 0600, NULL));
    want("keys", syscall(SYS_add_key, "user", "k", "v", 1, KEY_SPEC_PROCESS_KEYRING));
    want("pidfd", syscall(SYS_pidfd_open, getpid(), 0));
    unsigned char random[8];
    want("getrandom without waiting", syscall(SYS_getrandom, random, sizeof random, 1));
}

// The agent ends connections of clones so. That there is no such connection is an answer of a kernel that would end it.
static void connection_that_ends(void) {
    struct { struct nlmsghdr header; struct inet_diag_req_v2 body; } request = {
        { sizeof request, 21 /* SOCK_DESTROY */, NLM_F_REQUEST | NLM_F_ACK, 1, 0 },
        { .sdiag_family = AF_INET, .sdiag_protocol = IPPROTO_TCP, .id.idiag_sport = 1, .id.idiag_dport = 1 },
    };
    struct { struct nlmsghdr header; struct nlmsgerr body; } answer = { 0 };
    int s = socket(AF_NETLINK, SOCK_RAW, NETLINK_SOCK_DIAG);
    if (send(s, &request, sizeof request, 0) < 0 || recv(s, &answer, sizeof answer, 0) < 0) answer.body.error = -errno;
    errno = -answer.body.error;
    want("end a TCP connection by sock_diag", answer.body.error == -ENOENT ? 0 : -1);
}

static void sockets(void) {
    want("socket unix", socket(AF_UNIX, SOCK_STREAM, 0));
    want("socket inet", socket(AF_INET, SOCK_STREAM, 0));
    want("socket inet6", socket(AF_INET6, SOCK_DGRAM, 0));
    want("socket packet", socket(AF_PACKET, SOCK_RAW, 0));
    want("socket vsock", socket(AF_VSOCK, SOCK_STREAM, 0));
    want("netlink route", socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE));
    want("netlink netfilter", socket(AF_NETLINK, SOCK_RAW, NETLINK_NETFILTER));
    want("netlink sock_diag", socket(AF_NETLINK, SOCK_RAW, NETLINK_SOCK_DIAG));
    connection_that_ends();
    want("open /dev/net/tun", open("/dev/net/tun", O_RDWR));
    want("a free loop device", ioctl(open("/dev/loop-control", O_RDWR), 0x4c82 /* LOOP_CTL_GET_FREE */));
    int s = socket(AF_INET, SOCK_STREAM, 0);
    want("bridge", ioctl(s, 0x89a0 /* SIOCBRADDBR */, "br0"));
    want("TCP bbr", setsockopt(s, IPPROTO_TCP, 13 /* TCP_CONGESTION */, "bbr", 3));
}

// Runs a command of the root, if `check` could put it there.
static void command(const char *name, const char *program, char *const *arguments) {
    if (access(program, X_OK)) {
        printf("skip %s: this host has no %s to try it with\n", name, program);
        return;
    }
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        execv(program, arguments);
        _exit(127);
    }
    int status = -1;
    waitpid(pid, &status, 0);
    report(status == 0, name, "the command failed");
}

static void cpus(void) {
    report(strcmp(file_text("/sys/devices/system/cpu/possible"), "0-1\n") == 0, "both CPUs possible (MADT)",
           file_text("/sys/devices/system/cpu/possible"));
    want("bring a CPU online", write_text("/sys/devices/system/cpu/cpu1/online", "1"));
    report(strcmp(file_text("/sys/devices/system/cpu/online"), "0-1\n") == 0, "both CPUs online",
           file_text("/sys/devices/system/cpu/online"));
    want("take a CPU offline", write_text("/sys/devices/system/cpu/cpu1/online", "0"));
}

// A balloon that was offered free-page reporting (feature bit 5) and took it.
static void free_page_reporting(void) {
    char path[320];
    int seen = 0;
    DIR *folder = opendir("/sys/bus/virtio/drivers/virtio_balloon");
    for (struct dirent *e; folder && (e = readdir(folder));) {
        if (strncmp(e->d_name, "virtio", 6)) continue;
        snprintf(path, sizeof path, "/sys/bus/virtio/drivers/virtio_balloon/%s/features", e->d_name);
        seen |= file_text(path)[5] == '1';
    }
    report(seen, "balloon with free-page reporting", "feature not negotiated");
}

int main(void) {
    struct timespec up;
    clock_gettime(CLOCK_BOOTTIME, &up);
    setvbuf(stdout, NULL, _IOLBF, 0);
    mount("p", "/proc", "proc", 0, NULL);
    mounts();
    words("file system", "/proc/filesystems",
          (const char *const[]){"erofs", "ext4", "overlay", "virtiofs", "fuse", "tmpfs", "proc", "sysfs", "devtmpfs", "devpts",
                                "mqueue", "hugetlbfs", "cgroup2", "binfmt_misc", NULL});
    xattrs("tmpfs", "/t/x");
    xattrs("ext4", "/t/e/x");
    xattrs("overlay", "/t/o/x");
    words("cgroup controller", "/sys/fs/cgroup/cgroup.controllers",
          (const char *const[]){"cpuset", "cpu", "io", "memory", "hugetlb", "pids", NULL});
    in_child("cgroup control files", cgroup_files);
    in_child("cgroup device program (BPF)", cgroup_device);
    in_child("cgroup socket program and ring (BPF)", cgroup_sockets);
    paths("namespace", "/proc/self/ns",
          (const char *const[]){"cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts", NULL});
    in_child("unshare every namespace", namespaces);
    in_child("seccomp filter", seccomp_filter);
    paths("virtio driver", "/sys/bus/virtio/drivers",
          (const char *const[]){"virtio_blk", "virtio_net", "virtio_rng", "virtio_balloon", "virtio_mem", "virtio_pmem",
                                "virtiofs", "vmw_vsock_virtio_transport", NULL});
    report(access("/sys/bus/acpi/drivers/vmgenid", F_OK) == 0 || access("/sys/bus/platform/drivers/vmgenid", F_OK) == 0,
           "driver vmgenid", "no such driver");
    report(access("/sys/bus/nd/drivers/nd_pmem", F_OK) == 0, "driver nd_pmem", "no such driver");
    report(has_function("devm_namespace_enable"), "pmem namespaces attach", "libnvdimm without ND_CLAIM");
    report(has_function("fuse_dax_dontcache"), "virtio-fs with DAX", "FUSE without FUSE_DAX");
    free_page_reporting();
    report(strncmp(file_text("/sys/class/misc/hw_random/rng_current") + 0, "virtio_rng", 10) == 0 ||
               strncmp(file_text("/sys/devices/virtual/misc/hw_random/rng_current"), "virtio_rng", 10) == 0,
           "virtio-rng feeds the kernel", "not the current generator");
    report(access("/sys/devices/system/memory/block_size_bytes", R_OK) == 0, "memory hotplug", "no memory blocks");
    report(strncmp(file_text("/sys/devices/system/memory/auto_online_blocks"), "online", 6) == 0,
           "plugged memory comes online by itself", file_text("/sys/devices/system/memory/auto_online_blocks"));
    // A guest that boots with less than 512 MiB has them off, whatever the configuration, until someone writes here.
    want("huge pages by madvise", write_text("/sys/kernel/mm/transparent_hugepage/enabled", "madvise"));
    system_calls();
    sockets();
    cpus();
    command("nftables: masquerade, redirect, conntrack, reject in inet", "/bin/nft", (char *[]){"nft", "-f", "/rules.nft", NULL});
    report(access("/proc/modules", F_OK) != 0, "no loadable modules", "/proc/modules exists");

    printf("note up %ld ms when init began\n", up.tv_sec * 1000 + up.tv_nsec / 1000000);
    long total = 0, available = 0;
    sscanf(file_text("/proc/meminfo"), "MemTotal: %ld kB MemFree: %*d kB MemAvailable: %ld", &total, &available);
    printf("note memory %ld MiB usable, %ld MiB available\n", total / 1024, available / 1024);
    printf("checked %d missing %d\n", checked, missing);
    fflush(stdout);
    sync();
    reboot(RB_AUTOBOOT);
    return 1;
}
