// Memory of a kernel that runs on the host: which bytes it may read and write, and when.
#pragma once

namespace host {

// Who last accessed a byte of shared memory; -1: several.
struct Mark {
  int thread = -1, warp = -1;
  unsigned phase = 0, warp_phase = 0;

  bool is_before_now() const {  // a barrier of the block or of the warp is between
    if (phase < block.phase || thread == current->number) return true;
    return warp == current->warp && warp_phase < block.warp_phases[warp];
  }
  static Mark now() {
    return {current->number, current->warp, block.phase, block.warp_phases[current->warp]};
  }
  void add(const Mark& later) {
    const bool stays = !is_before_now();
    const bool same_warp = warp == later.warp;
    *this = later;
    if (stays) thread = -1;
    if (stays && !same_warp) warp = -1;
  }
};

struct Byte {
  enum { UNWRITTEN, WRITTEN, COPYING, OUTSIDE } state = UNWRITTEN;
  Mark writer, reader;
  unsigned proxy_fences = 0;  // of its writer at that time
  int products = 0;           // under way that read it
};

// An array in global memory, which the caller holds. Its bytes know their writer of this launch.
struct Array {
  const char* name;
  char* data;
  int64_t size;
  int64_t writable;
  uint64_t* writer;  // 0: nobody; else the thread in the grid from 1 on, shifted, and the phase
  uint32_t* writes;  // of each byte

  void check(const char* at, int64_t bytes, int64_t alignment) const {
    const int64_t first = at - data;
    if (first < 0 || first + bytes > size)
      fail("%s: out of bounds: bytes %ld to %ld of %ld", name, first, first + bytes, size);
    if (first % alignment) fail("%s: misaligned: %ld bytes at byte %ld", name, bytes, first);
  }
  static uint64_t me() {
    const uint64_t threads = block.lanes.size();
    return (block.number * threads + current->number + 1) << 32 | block.phase;
  }
  void check_order(int64_t at, const char* what) const {
    const uint64_t by = writer[at], own = me(), threads = block.lanes.size();
    if (by == 0 || by >> 32 == own >> 32) return;
    const bool same_block = ((by >> 32) - 1) / threads == block.number;
    if (!same_block || uint32_t(by) == block.phase)
      fail("%s: byte %ld %s that another thread writes", name, at, what);
  }
  void read(void* to, const char* at, int64_t bytes, int64_t alignment) const {
    check(at, bytes, alignment);
    for (int64_t i = at - data; writable && i < at - data + bytes; ++i) {
      if (writes[i] == 0) fail("%s: byte %ld is read, but not written", name, i);
      check_order(i, "is read");
    }
    memcpy(to, at, bytes);
  }
  void write(char* at, const void* from, int64_t bytes) {
    check(at, bytes, bytes);
    if (!writable) fail("%s: an input is written", name);
    for (int64_t i = at - data; i < at - data + bytes; ++i) {
      check_order(i, "is written");
      writer[i] = me();
      writes[i]++;
    }
    memcpy(at, from, bytes);
  }
};

struct Shared {
  static constexpr uint32_t BASE = 1088;  // addresses start here, at a multiple of 64
  static constexpr int64_t LIMIT = 1 << 20, GAP = 256;
  std::vector<char> data;
  std::vector<Byte> bytes;
  std::map<int, int64_t> offsets;  // of static arrays

  void reset(int64_t dynamic_bytes) {
    data.reserve(LIMIT);
    data.assign(dynamic_bytes, char(0xFF));
    bytes.assign(dynamic_bytes, {});
    offsets.clear();
  }
  int64_t offset(int number, int64_t size) {  // of a static array, behind a gap
    if (!offsets.count(number)) {
      const int64_t first = (data.size() + 2 * GAP - 1) / GAP * GAP;
      if (first + size > LIMIT) fail("more than %ld bytes of shared memory", LIMIT);
      bytes.resize(first, Byte{Byte::OUTSIDE, {}, {}});
      bytes.resize(first + size);
      data.resize(first + size, char(0xFF));
      offsets[number] = first;
    }
    return offsets[number];
  }
  Byte* check(int64_t offset, int64_t size) {
    if (offset < 0 || offset + size > int64_t(data.size()))
      fail("shared memory: out of bounds: bytes %ld to %ld of %ld", offset, offset + size,
           int64_t(data.size()));
    if (offset % size) fail("shared memory: misaligned: %ld bytes at byte %ld", size, offset);
    if (bytes[offset].state == Byte::OUTSIDE) fail("shared memory: between two arrays");
    return &bytes[offset];
  }
  void read(void* to, int64_t offset, int64_t size) {
    Byte* byte = check(offset, size);
    for (int64_t i = 0; i < size; ++i, ++byte) {
      if (byte->state == Byte::COPYING) fail("shared memory: read before its copy is complete");
      if (byte->state == Byte::UNWRITTEN) fail("shared memory: read, but not written");
      if (!byte->writer.is_before_now())
        fail("shared memory: read without a barrier after thread %d wrote", byte->writer.thread);
      byte->reader.add(Mark::now());
    }
    memcpy(to, &data[offset], size);
  }
  void read_by_product(void* to, int64_t offset, int64_t size) {  // by the asynchronous proxy
    read(to, offset, size);
    for (Byte* byte = &bytes[offset]; byte < &bytes[offset] + size; ++byte) {
      if (block.lanes[byte->writer.thread].proxy_fences == byte->proxy_fences)
        fail("shared memory: no fence.proxy.async after thread %d wrote", byte->writer.thread);
      byte->products++;
    }
  }
  void end_product(int64_t offset, int64_t size) {
    for (Byte* byte = &bytes[offset]; byte < &bytes[offset] + size; ++byte) {
      byte->reader.add(Mark::now());
      byte->products--;
    }
  }
  void claim(int64_t offset, int64_t size) {  // before a write
    Byte* byte = check(offset, size);
    for (int64_t i = 0; i < size; ++i, ++byte) {
      if (byte->state == Byte::COPYING) fail("shared memory: written while a copy is under way");
      if (byte->products) fail("shared memory: written while a product reads it");
      if (!byte->reader.is_before_now())
        fail("shared memory: overwritten while other threads may read it");
      if (byte->state == Byte::WRITTEN && !byte->writer.is_before_now())
        fail("shared memory: written by two threads without a barrier");
    }
  }
  void put(int64_t offset, const void* from, int64_t size) {
    memcpy(&data[offset], from, size);
    for (int64_t i = offset; i < offset + size; ++i) {
      bytes[i].state = Byte::WRITTEN;
      bytes[i].writer = Mark::now();
      bytes[i].proxy_fences = current->proxy_fences;
    }
  }
  void write(int64_t offset, const void* from, int64_t size) {
    claim(offset, size);
    put(offset, from, size);
  }
  void start_copy(const Copy& copy) {
    claim(copy.offset, copy.size);
    memset(&data[copy.offset], 0xFF, copy.size);
    for (uint32_t i = 0; i < copy.size; ++i) bytes[copy.offset + i].state = Byte::COPYING;
    current->copies.back().push_back(copy);
  }
  void wait(size_t pending) {  // until this thread's groups are complete but the last ones
    auto& groups = current->copies;
    while (groups.size() - 1 > pending) {
      for (const Copy& copy : groups.front()) put(copy.offset, copy.data, copy.size);
      groups.erase(groups.begin());
    }
  }
};

inline Shared shared;

// A pointer: into `array`, into shared memory, or, with neither, into the stack of its thread.
struct Place {
  char* at = nullptr;
  Array* array = nullptr;
  bool is_shared = false;

  void read(void* to, int64_t size) const {
    if (array)
      array->read(to, at, size, size);
    else if (is_shared)
      shared.read(to, at - shared.data.data(), size);
    else
      memcpy(to, local(size), size);
  }
  void write(const void* from, int64_t size) const {
    if (array)
      array->write(at, from, size);
    else if (is_shared)
      shared.write(at - shared.data.data(), from, size);
    else
      memcpy(local(size), from, size);
  }
  char* local(int64_t size) const {
    if (array || is_shared || at < current->stack || at + size > current->stack + STACK)
      fail("an address that is not of this thread's registers");
    return at;
  }
};

template <class T>
struct Ptr;

template <class T>
struct Ref {
  Place place;

  T load() const {
    T value;
    place.read(&value, sizeof value);
    return value;
  }
  void store(const T& value) const { place.write(&value, sizeof value); }
  operator T() const { return load(); }
  template <class U>
  explicit operator U() const {
    return U(load());
  }
  const Ref& operator=(const T& value) const { return store(value), *this; }
  const Ref& operator=(const Ref& other) const { return *this = other.load(); }
  Ref(const Ref&) = default;
  explicit Ref(const Place& place) : place(place) {}
  Ptr<T> operator&() const { return Ptr<T>(place); }
};

template <>
struct Ref<void> {
  explicit Ref(const Place&) {}
};

template <class T>
struct Ptr {
  Place place;

  Ptr() = default;
  explicit Ptr(const Place& place) : place(place) {}
  explicit Ptr(Array* array) : place{array->data, array} {}
  template <class U>
  Ptr(U* local) : place{reinterpret_cast<char*>(const_cast<std::remove_const_t<U>*>(local))} {}
  template <class U>
  Ptr(const Ptr<U>& other) : place(other.place) {}
  Ptr operator+(int64_t count) const {
    Ptr moved = *this;
    moved.place.at += count * int64_t(sizeof(T));
    return moved;
  }
  Ref<T> operator*() const { return Ref<T>(place); }
  Ref<T> operator[](int64_t index) const { return *(*this + index); }
  T* operator->() const { return reinterpret_cast<T*>(place.local(sizeof(T))); }
};

// Registers that nothing was written to hold NaN.
template <class T, size_t COUNT>
void poison(T (&registers)[COUNT]) {
  memset(static_cast<void*>(registers), 0xFF, sizeof registers);
}

template <class T>
Ptr<T> dynamic_shared() {
  return Ptr<T>(Place{shared.data.data(), nullptr, true});
}

template <class T>
Ptr<T> static_shared(int number, int64_t count) {
  return dynamic_shared<T>() + shared.offset(number, count * sizeof(T)) / int64_t(sizeof(T));
}

}  // namespace host

using host::Ptr;

inline uint32_t __cvta_generic_to_shared(const Ptr<void>& pointer) {
  if (!pointer.place.is_shared) host::fail("not an address of shared memory");
  return host::Shared::BASE + uint32_t(pointer.place.at - host::shared.data.data());
}
