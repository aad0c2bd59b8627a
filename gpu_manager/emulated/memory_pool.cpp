// The memory of an emulated GPU that the models of one process share: one mapping, from which torch
// takes its tensors. Every model has an account, to the byte, and a limit; pages that are free are
// given back to the system on demand. Called from Python by ctypes (memory_pool.py).

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kPage = 4096;
// From this size on a block begins and ends at a page's border: all of it can be given back.
constexpr size_t kWholePages = 16 * kPage;

size_t round_up(size_t size, size_t to) { return (size + to - 1) / to * to; }

struct Account {
  size_t used = 0;
  size_t peak = 0;
  size_t limit = SIZE_MAX;
};

struct Block {
  size_t size;
  int model;      // -1: free
  size_t asked;   // what the account was charged
  bool touched;   // a free block's pages may be resident
};

thread_local int this_model = -1;

class Pool {
 public:
  bool reserve(size_t bytes) {
    std::lock_guard<std::mutex> held(lock_);
    if (base_ != nullptr) return true;
    // Pages that nobody may touch lie around it: the system joins no other memory to this mapping.
    void* found = mmap(nullptr, bytes + 2 * kPage, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return false;
    char* inside = static_cast<char*>(found) + kPage;
    if (mprotect(inside, bytes, PROT_READ | PROT_WRITE) != 0) {
      munmap(found, bytes + 2 * kPage);
      return false;
    }
    base_ = inside;
    put_free(0, bytes, false);
    return true;
  }

  void* take(size_t asked) {
    if (asked == 0) return nullptr;
    std::lock_guard<std::mutex> held(lock_);
    int model = this_model >= 0 ? this_model : lone();
    Account& account = accounts_[model];
    if (asked > account.limit || account.used > account.limit - asked) refuse(asked, "");
    if (asked > together_ || charged_ > together_ - asked) refuse(asked, " beside other models");
    size_t size = round_up(asked, asked >= kWholePages ? kPage : kAlignment);
    size_t at = find(size, asked >= kWholePages ? kPage : kAlignment);
    if (at == SIZE_MAX) refuse(asked, "");
    blocks_[at] = Block{size, model, asked, true};
    account.used += asked;
    charged_ += asked;
    account.peak = std::max(account.peak, account.used);
    used_ += size;
    peak_ = std::max(peak_, used_);
    return base_ + at;
  }

  void give(void* place) {
    if (place == nullptr) return;
    std::lock_guard<std::mutex> held(lock_);
    size_t at = static_cast<char*>(place) - base_;
    auto found = blocks_.find(at);
    Account& account = accounts_[found->second.model];
    account.used -= found->second.asked;
    charged_ -= found->second.asked;
    used_ -= found->second.size;
    size_t size = found->second.size;
    if (found != blocks_.begin()) {
      auto before = std::prev(found);
      if (is_touched(before->second)) {
        at = before->first;
        size += before->second.size;
        drop_free(before->first, before->second);
        blocks_.erase(before);
      }
    }
    auto after = std::next(found);
    if (after != blocks_.end() && is_touched(after->second)) {
      size += after->second.size;
      drop_free(after->first, after->second);
      blocks_.erase(after);
    }
    blocks_.erase(found);
    put_free(at, size, true);
  }

  // Give the pages of free blocks back, the largest first, until at most `keep` bytes of them may
  // be resident; return how many that are.
  size_t trim(size_t keep) {
    std::lock_guard<std::mutex> held(lock_);
    auto next = touched_.end();
    while (touched_bytes_ > keep && next != touched_.begin()) {
      auto [size, at] = *--next;
      if (size < kPage && keep > 0) break;  // as all that are left: not worth a look after a call
      auto found = blocks_.find(at);
      auto [begin, end] = free_pages(found);
      if (begin >= end) continue;  // it has parts of two pages
      madvise(base_ + begin, end - begin, MADV_DONTNEED);
      next = std::next(next);
      drop_free(at, found->second);
      found->second.touched = false;
      place_free(at, found->second);
      join_untouched(found);
    }
    return touched_bytes_;
  }

  Account account(int model) {
    std::lock_guard<std::mutex> held(lock_);
    return accounts_[model];
  }

  void limit(int model, size_t bytes) {
    std::lock_guard<std::mutex> held(lock_);
    accounts_[model].limit = bytes;
  }

  void limit_together(size_t bytes) {
    std::lock_guard<std::mutex> held(lock_);
    together_ = bytes;
  }

  void watch(int model) {
    std::lock_guard<std::mutex> held(lock_);
    Account& account = accounts_[model];
    account.peak = account.used;
  }

  size_t forget(int model) {
    std::lock_guard<std::mutex> held(lock_);
    size_t left = accounts_[model].used;
    if (left == 0) accounts_.erase(model);
    return left;
  }

  size_t used() {
    std::lock_guard<std::mutex> held(lock_);
    return used_;
  }

  // The most that was in use since this was last asked.
  size_t take_peak() {
    std::lock_guard<std::mutex> held(lock_);
    size_t peak = peak_;
    peak_ = used_;
    return peak;
  }

  void enter(int model) {
    std::lock_guard<std::mutex> held(lock_);
    running_.push_back(model);
    this_model = model;
  }

  void leave(int model, int before) {
    std::lock_guard<std::mutex> held(lock_);
    running_.erase(std::find(running_.begin(), running_.end(), model));
    this_model = before;
  }

 private:
  // An operator's own threads belong to the model that runs, if it is the only one.
  int lone() const { return running_.size() == 1 ? running_.front() : 0; }

  [[noreturn]] void refuse(size_t asked, const char* why) const {
    TORCH_CHECK(false, "the pool can't allocate memory", why, ": you tried to allocate ", asked,
                " bytes.");
  }

  // The smallest free block that has room, touched ones first: their pages are there.
  size_t find(size_t size, size_t alignment) {
    for (auto* free : {&touched_, &untouched_}) {
      for (auto each = free->lower_bound({size, 0}); each != free->end(); ++each) {
        auto [have, at] = *each;
        size_t begin = round_up(at, alignment);
        if (begin + size > at + have) continue;
        bool touched = blocks_[at].touched;
        drop_free(at, blocks_[at]);
        blocks_.erase(at);
        if (begin > at) put_free(at, begin - at, touched);
        if (at + have > begin + size) put_free(begin + size, at + have - begin - size, touched);
        return begin;
      }
    }
    return SIZE_MAX;
  }

  // The pages of a free block; those at its borders too where the free blocks beside it have the
  // rest of them, which were left when those were given back.
  std::pair<size_t, size_t> free_pages(std::map<size_t, Block>::iterator found) {
    size_t at = found->first, after = at + found->second.size;
    size_t begin = round_up(at, kPage), end = after / kPage * kPage;
    if (begin > at && found != blocks_.begin()) {
      auto before = std::prev(found);
      if (is_untouched(before->second) && before->first <= begin - kPage) begin -= kPage;
    }
    auto next = std::next(found);
    if (end < after && next != blocks_.end() && is_untouched(next->second) &&
        next->first + next->second.size >= end + kPage) {
      end += kPage;
    }
    return {begin, end};
  }

  void put_free(size_t at, size_t size, bool touched) {
    Block block{size, -1, 0, touched};
    blocks_[at] = block;
    place_free(at, block);
  }

  void place_free(size_t at, const Block& block) {
    (block.touched ? touched_ : untouched_).insert({block.size, at});
    if (block.touched) touched_bytes_ += block.size;
  }

  void drop_free(size_t at, const Block& block) {
    (block.touched ? touched_ : untouched_).erase({block.size, at});
    if (block.touched) touched_bytes_ -= block.size;
  }

  void join_untouched(std::map<size_t, Block>::iterator found) {
    auto after = std::next(found);
    if (after != blocks_.end() && is_untouched(after->second)) join(found, after);
    if (found != blocks_.begin()) {
      auto before = std::prev(found);
      if (is_untouched(before->second)) join(before, found);
    }
  }

  static bool is_touched(const Block& block) { return block.model < 0 && block.touched; }
  static bool is_untouched(const Block& block) { return block.model < 0 && !block.touched; }

  void join(std::map<size_t, Block>::iterator first, std::map<size_t, Block>::iterator second) {
    drop_free(first->first, first->second);
    drop_free(second->first, second->second);
    first->second.size += second->second.size;
    blocks_.erase(second);
    place_free(first->first, first->second);
  }

  std::mutex lock_;
  char* base_ = nullptr;
  size_t used_ = 0;
  size_t peak_ = 0;
  size_t charged_ = 0;             // to all accounts
  size_t together_ = SIZE_MAX;     // the most of that
  size_t touched_bytes_ = 0;
  std::map<size_t, Block> blocks_;
  std::set<std::pair<size_t, size_t>> touched_, untouched_;
  std::unordered_map<int, Account> accounts_;
  std::vector<int> running_;
};

Pool& pool() {
  static Pool* made = new Pool();  // never destroyed: tensors may outlive every other object
  return *made;
}

void give_back(void* place) { pool().give(place); }

class PoolAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    void* place = pool().take(size);
    return {place, place, &give_back, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }
};

}  // namespace

extern "C" {

// Have torch take its tensors from the pool from now on; 0 if there is no room to map it.
int gpufaas_pool_install(size_t bytes) {
  static PoolAllocator allocator;
  if (!pool().reserve(bytes)) return 0;
  c10::SetCPUAllocator(&allocator, UINT8_MAX);
  return 1;
}

int gpufaas_pool_enter(int model) {
  int before = this_model;
  pool().enter(model);
  return before;
}
void gpufaas_pool_leave(int model, int before) { pool().leave(model, before); }
void gpufaas_pool_adopt_thread(int model) { this_model = model; }
void gpufaas_pool_limit(int model, size_t bytes) { pool().limit(model, bytes); }
void gpufaas_pool_limit_together(size_t bytes) { pool().limit_together(bytes); }
void gpufaas_pool_watch(int model) { pool().watch(model); }
size_t gpufaas_pool_used_by(int model) { return pool().account(model).used; }
size_t gpufaas_pool_peak_of(int model) { return pool().account(model).peak; }
size_t gpufaas_pool_forget(int model) { return pool().forget(model); }
size_t gpufaas_pool_take_peak() { return pool().take_peak(); }
size_t gpufaas_pool_used() { return pool().used(); }
size_t gpufaas_pool_trim(size_t keep) { return pool().trim(keep); }
}
