// A new file, written past the page cache (O_DIRECT) by several threads.
//
//     file_append   copies into a block; one of the threads writes a full one, at its place in the file
//     file_close    waits for the threads, cuts the file to its size, syncs it
//
// O_DIRECT asks for memory, offsets and lengths that are multiples of 4096: blocks are, and the last one is padded with
// zeros, which are cut off again. Where a file system has no O_DIRECT, the same bytes go through the page cache.
// Functions return 0, or the error number of the first thing that failed; nothing is thrown.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#ifndef O_DIRECT  // macOS
#define O_DIRECT 0
#endif

namespace {

constexpr size_t BLOCK = 4 << 20, ALIGNMENT = 4096;

struct Full {
    char* block;
    size_t length;
    off_t offset;
};

struct File {
    int descriptor;
    size_t size = 0;        // appended so far
    char* filling = nullptr;  // the block that is being filled, with the bytes after the last multiple of BLOCK
    std::vector<std::thread> threads;

    std::mutex mutex;  // of what follows
    std::condition_variable changed;
    std::vector<char*> empty;
    std::deque<Full> full;
    bool closing = false;
    int error = 0;

    int write_all(const Full& piece) {
        for (size_t done = 0; done < piece.length;) {
            ssize_t count = pwrite(descriptor, piece.block + done, piece.length - done, piece.offset + off_t(done));
            if (count >= 0) {
                done += size_t(count);
            } else if (errno == EINVAL && (fcntl(descriptor, F_GETFL) & O_DIRECT)) {
                // The file system takes the flag, but not these lengths.
                fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) & ~O_DIRECT);
            } else if (errno != EINTR) {
                return errno;
            }
        }
        return 0;
    }

    void work() {
        std::unique_lock<std::mutex> lock(mutex);
        while (true) {
            changed.wait(lock, [this] { return closing || !full.empty(); });
            if (full.empty()) return;
            Full piece = full.front();
            full.pop_front();
            lock.unlock();
            int failed = write_all(piece);
            lock.lock();
            if (!error) error = failed;
            empty.push_back(piece.block);
            changed.notify_all();
        }
    }

    int take_empty() {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return error || !empty.empty(); });
        if (error) return error;
        filling = empty.back();
        empty.pop_back();
        return 0;
    }

    void hand_over(size_t filled) {
        size_t length = (filled + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        memset(filling + filled, 0, length - filled);
        std::lock_guard<std::mutex> lock(mutex);
        full.push_back({filling, length, off_t(size - filled)});
        filling = nullptr;
        changed.notify_all();
    }

    int append(const char* data, size_t length) {
        while (length) {
            if (!filling)
                if (int failed = take_empty()) return failed;
            size_t filled = size % BLOCK, part = std::min(length, BLOCK - filled);
            memcpy(filling + filled, data, part);
            size += part, data += part, length -= part;
            if (size % BLOCK == 0) hand_over(BLOCK);
        }
        return 0;
    }

    int close(bool complete) {
        if (filling && complete) hand_over(size % BLOCK);
        {
            std::lock_guard<std::mutex> lock(mutex);
            closing = true;
            if (!complete) {
                for (Full& piece : full) empty.push_back(piece.block);
                full.clear();
            }
            changed.notify_all();
        }
        for (std::thread& thread : threads) thread.join();
        if (complete && !error && ftruncate(descriptor, off_t(size))) error = errno;
        if (complete && !error && fsync(descriptor)) error = errno;
        ::close(descriptor);
        for (char* block : empty) free(block);
        free(filling);
        return error;
    }
};

int open_new(const char* path) {
    constexpr int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
    int descriptor = open(path, flags | O_DIRECT, 0666);
    if (descriptor >= 0 || errno != EINVAL) return descriptor;
    unlink(path);  // some file systems refuse the flag after they have made the file
    return open(path, flags, 0666);
}

}  // namespace

extern "C" {

// A new file at `path`, of which `expected` bytes are reserved; null and `*error` if it cannot be made.
void* file_open(const char* path, size_t expected, int threads, int* error) {
    int descriptor = open_new(path);
    if (descriptor < 0) {
        *error = errno;
        return nullptr;
    }
#ifdef __linux__
    // Writes within the file need no lock on its size. What cannot be reserved is reported when it is written.
    if (expected && fallocate(descriptor, 0, 0, off_t(expected))) errno = 0;
#endif
    File* file = new File{descriptor};
    try {
        for (int number = 0; number < threads + 2; ++number) {
            void* block = nullptr;
            if (posix_memalign(&block, ALIGNMENT, BLOCK)) throw std::bad_alloc();
            file->empty.push_back(static_cast<char*>(block));
        }
        for (int number = 0; number < threads; ++number) file->threads.emplace_back([file] { file->work(); });
        return file;
    } catch (const std::bad_alloc&) {
        *error = ENOMEM;
    } catch (const std::system_error&) {  // no more threads
        *error = EAGAIN;
    }
    file->close(false);
    delete file;
    return nullptr;
}

// Append a copy of `length` bytes. The error may be that of an earlier call: threads write later.
int file_append(void* file, const char* data, size_t length) { return static_cast<File*>(file)->append(data, length); }

// End the threads and close the file; `complete`: after all that was appended is on the disk.
int file_close(void* file, int complete) {
    int error = static_cast<File*>(file)->close(complete);
    delete static_cast<File*>(file);
    return error;
}
}
