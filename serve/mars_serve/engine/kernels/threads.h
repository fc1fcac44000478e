// Shares the pieces of a job among threads. The caller takes whatever piece no other thread has
// taken yet and waits only for pieces that a thread has begun, so that a thread which the system
// does not run, since another program has its core, holds up nothing. OpenMP's threads all have to
// come to the end of a loop, and a step has a hundred loops of some microseconds.

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

namespace {

class Threads {
 public:
  // Calls body(i) for i from 0 to count - 1, in up to num_threads threads. If another thread is in
  // here, or none can be started, the calling thread does all of it.
  template <typename Body>
  void run(int64_t num_threads, int64_t count, const Body& body) {
    std::unique_lock<std::mutex> alone(caller_, std::defer_lock);
    if (num_threads < 2 || count < 2 || count >= kClosed || !alone.try_lock() ||
        !start(num_threads - 1)) {
      for (int64_t i = 0; i < count; ++i) body(i);
      return;
    }
    call_ = [](const void* job, int64_t i) { (*static_cast<const Body*>(job))(i); };
    job_ = &body;
    count_ = count;
    helpers_ = num_threads - 1;
    done_ = 0;
    const uint64_t number = (next_ >> 32) + 1;
    next_ = number << 32;
    if (asleep_ > 0) {
      { std::lock_guard<std::mutex> lock(sleep_); }  // who looks at next_ now sees it or is woken
      wake_.notify_all();
    }
    work(number);
    for (int turns = 0; done_ < count; ++turns) wait_a_little(turns);
    next_ = number << 32 | kClosed;  // no thread that is late may take a piece of the next job
  }

 private:
  static constexpr int64_t kClosed = UINT32_MAX;
  static constexpr int kTurns = 20000;  // about 200 us of looking out for a job before sleep

  static void wait_a_little(int turns) {
    if (turns % 1024 == 1023) std::this_thread::yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  // Takes pieces of the job of this number until none is left.
  void work(uint64_t number) {
    for (uint64_t next = next_; next >> 32 == number && int64_t(next & kClosed) < count_;) {
      if (!next_.compare_exchange_weak(next, next + 1)) continue;
      call_.load()(job_, next & kClosed);
      ++done_;
      next = next_;
    }
  }

  void help(int64_t index, uint64_t number) {
    for (;;) {
      for (int turns = 0; next_ >> 32 == number; ++turns) {
        wait_a_little(turns);
        if (turns < kTurns) continue;
        std::unique_lock<std::mutex> lock(sleep_);
        ++asleep_;
        wake_.wait(lock, [&] { return next_ >> 32 != number; });
        --asleep_;
      }
      number = next_ >> 32;
      if (index < helpers_) work(number);
    }
  }

  // Returns whether as many helping threads run, and starts those that are missing.
  bool start(int64_t wanted) {
    if (started_ >= wanted) return true;
    sigset_t all, before;  // signals are for Python's main thread
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (; started_ < wanted; ++started_)
        std::thread(&Threads::help, this, started_, next_ >> 32).detach();
    } catch (const std::system_error&) {
    } catch (const std::bad_alloc&) {
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return started_ > 0;
  }

  std::mutex caller_, sleep_;
  std::condition_variable wake_;
  int64_t started_ = 0;
  std::atomic<uint64_t> next_{kClosed};  // number of the job << 32 | the first piece not taken
  std::atomic<int64_t> count_{0}, helpers_{0}, done_{0}, asleep_{0};
  std::atomic<const void*> job_{nullptr};
  std::atomic<void (*)(const void*, int64_t)> call_{nullptr};
};

// The threads of this process. They live as long as it does; a process that is forked has none yet.
Threads* threads = new Threads;
const int registered = pthread_atfork(nullptr, nullptr, [] { threads = new Threads; });

}  // namespace
