// The device "fakegpu", torch's PrivateUse1: memory has sizes and no contents, streams and events have only an order.
// Here is what torch calls from C++: allocation, streams, events, copies and views. Operators are in _fake_operators.py.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/strides.h>
#include <sys/mman.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
constexpr auto kFake = c10::DeviceType::PrivateUse1;

// ---------------------------------------------------------------------------------------------------------------- log

// Same order as KINDS in device_log.py.
enum Kind { OPERATOR, ALLOCATION, FREE, EVENT_RECORD, EVENT_WAIT, COPY_IN, COPY_OUT, COPY, HOST_WAIT };

using Entry = std::tuple<int, int64_t, int64_t, int64_t>;  // kind, stream, number (index, address or event), bytes

std::mutex mutex;
std::vector<Entry> entries;
bool is_recording = false;
int64_t num_operators = 0;  // indices of operators and host waits, whose details are kept in Python
int64_t allocated_bytes = 0;
int64_t peak_bytes = 0;
int64_t next_stream = 1;
int64_t next_event = 1;
thread_local int64_t current_stream = 0;
py::object* host_wait = nullptr;  // called with the reason, and with the CPU tensor that receives values or None

void put(Kind kind, int64_t stream, int64_t number = 0, int64_t bytes = 0) {
  std::lock_guard<std::mutex> guard(mutex);
  if (is_recording) entries.emplace_back(kind, stream, number, bytes);
}

void wait_on_host(const char* reason, const std::optional<at::Tensor>& read = std::nullopt) {
  py::gil_scoped_acquire gil;
  if (host_wait != nullptr) (*host_wait)(reason, read);
}

// ------------------------------------------------------------------------------------------------------------- memory

// Addresses of a range without access rights: a host that reads or writes device memory dies. No address is used twice.
constexpr size_t kRange = size_t(1) << 46;
constexpr int64_t kBlock = 512;  // the unit of CUDA's caching allocator
char* range_start = nullptr;
size_t range_used = 0;
std::unordered_map<void*, int64_t> block_bytes;

void* allocate_block(size_t num_bytes) {
  std::lock_guard<std::mutex> guard(mutex);
  if (range_start == nullptr) {
    void* mapped = mmap(nullptr, kRange, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(mapped != MAP_FAILED, "fakegpu: got no address range of 64 TiB; expected unlimited virtual memory");
    range_start = static_cast<char*>(mapped);
  }
  const int64_t rounded = (static_cast<int64_t>(num_bytes) + kBlock - 1) / kBlock * kBlock;
  TORCH_CHECK(range_used + rounded < kRange, "fakegpu: 64 TiB of addresses are used up; start another process");
  void* block = range_start + range_used;
  range_used += rounded;
  block_bytes[block] = rounded;
  allocated_bytes += rounded;
  peak_bytes = std::max(peak_bytes, allocated_bytes);
  if (is_recording) entries.emplace_back(ALLOCATION, current_stream, reinterpret_cast<int64_t>(block), rounded);
  return block;
}

void free_block(void* block) {
  std::lock_guard<std::mutex> guard(mutex);
  auto found = block_bytes.find(block);
  if (found == block_bytes.end()) return;
  allocated_bytes -= found->second;
  if (is_recording) entries.emplace_back(FREE, current_stream, reinterpret_cast<int64_t>(block), found->second);
  block_bytes.erase(found);
}

struct FakeAllocator final : public c10::DeviceAllocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* block = num_bytes == 0 ? nullptr : allocate_block(num_bytes);
    return {block, block, &free_block, Device(kFake, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void*, const void*, std::size_t) const override {}
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = stats.reserved_bytes[0].current = allocated_bytes;
    stats.allocated_bytes[0].peak = stats.reserved_bytes[0].peak = peak_bytes;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override { peak_bytes = allocated_bytes; }
};
FakeAllocator allocator;

std::map<char*, size_t> pinned_blocks;

struct PinnedAllocator final : public c10::Allocator {
  static void free_pinned(void* block) {
    std::lock_guard<std::mutex> guard(mutex);
    pinned_blocks.erase(static_cast<char*>(block));
    std::free(block);
  }
  c10::DataPtr allocate(size_t num_bytes) override {
    void* block = nullptr;
    TORCH_CHECK(posix_memalign(&block, 64, std::max<size_t>(num_bytes, 64)) == 0, "out of host memory");
    std::lock_guard<std::mutex> guard(mutex);
    pinned_blocks[static_cast<char*>(block)] = std::max<size_t>(num_bytes, 64);
    return {block, block, &free_pinned, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
};
PinnedAllocator pinned_allocator;

// -------------------------------------------------------------------------------------------------- streams and events

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFake; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(kFake, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return stream(current_stream); }
  Stream getDefaultStream(Device) const override { return stream(0); }
  Stream getNewStream(Device, int) const override {
    std::lock_guard<std::mutex> guard(mutex);
    return stream(next_stream++);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream next) const override {
    const int64_t before = current_stream;
    current_stream = next.id();
    return stream(before);
  }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const Stream& on, const DeviceIndex, const c10::EventFlag) const override {
    {
      std::lock_guard<std::mutex> guard(mutex);
      if (*event == nullptr) *event = reinterpret_cast<void*>(next_event++);
    }
    put(EVENT_RECORD, on.id(), reinterpret_cast<int64_t>(*event));
  }
  void block(void* event, const Stream& waiting) const override {
    if (event != nullptr) put(EVENT_WAIT, waiting.id(), reinterpret_cast<int64_t>(event));
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { wait_on_host("stream synchronized"); }
  void synchronizeEvent(void*) const override { wait_on_host("event synchronized"); }
  void synchronizeDevice(const DeviceIndex) const override { wait_on_host("device synchronized"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }

 private:
  static Stream stream(int64_t id) { return Stream(Stream::UNSAFE, Device(kFake, 0), id); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : public at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* pointer) const override {
    std::lock_guard<std::mutex> guard(mutex);
    auto* byte = const_cast<char*>(static_cast<const char*>(pointer));
    auto after = pinned_blocks.upper_bound(byte);
    if (after == pinned_blocks.begin()) return false;
    auto block = std::prev(after);
    return static_cast<size_t>(byte - block->first) < block->second;
  }
  Device getDeviceFromPtr(void*) const override { return Device(kFake, 0); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    if (num_bytes == impl->nbytes()) return;
    impl->set_data_ptr_noswap(allocator.allocate(num_bytes));
    impl->set_nbytes(num_bytes);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    static at::Generator generator = at::detail::createCPUGenerator();
    return generator;
  }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};
Hooks hooks;

// ---------------------------------------------------------------------------------------- operators that handle memory

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

at::Tensor& set_source(at::Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                       c10::IntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  const auto contiguous = c10::contiguous_strides(size);
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, stride.size() == size.size() ? stride : c10::IntArrayRef(contiguous));
  return tensor;
}

const at::Tensor& resize(const at::Tensor& tensor, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t needed = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  if (tensor.storage().nbytes() < needed) hooks.resizePrivateUse1Bytes(tensor.storage(), needed);
  return tensor;
}

// A copy is asynchronous only from and to pinned memory: CUDA C++ programming guide, "API synchronization behavior".
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const int64_t num_bytes = to.nbytes();
  if (from.is_privateuseone() && to.is_privateuseone()) {
    put(COPY, current_stream, 0, num_bytes + from.nbytes());
  } else if (to.is_privateuseone()) {
    put(COPY_IN, current_stream, 0, num_bytes);
    if (!non_blocking || !from.is_pinned()) wait_on_host("copy from pageable or with blocking");
  } else {
    put(COPY_OUT, current_stream, 0, num_bytes);
    to.zero_();
    if (!non_blocking || !to.is_pinned()) wait_on_host("copy to host", to);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) { return copy_from(from, to, false); }

at::Scalar read_scalar(const at::Tensor& tensor) {
  const at::Tensor value = at::zeros({}, tensor.options().device(c10::DeviceType::CPU));
  wait_on_host("scalar read", value);
  return value.item();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("set_.source_Storage_storage_offset", &set_source);
  m.impl("resize_", &resize);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &read_scalar);
}

int64_t choose_sdpa(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double,
                    bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::overrideable);
}

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_sdpa)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(kFake, &allocator);
  m.def("put_operator", [](int64_t stream) {
    std::lock_guard<std::mutex> guard(mutex);
    if (is_recording) entries.emplace_back(OPERATOR, stream < 0 ? current_stream : stream, num_operators, 0);
    return is_recording ? num_operators++ : -1;
  });
  m.def("put_host_wait", [] {
    std::lock_guard<std::mutex> guard(mutex);
    if (is_recording) entries.emplace_back(HOST_WAIT, current_stream, num_operators, 0);
    return is_recording ? num_operators++ : -1;
  });
  m.def("put_event_wait", [](int64_t event, int64_t stream) { put(EVENT_WAIT, stream < 0 ? current_stream : stream, event); });
  m.def("put_event_record", [](int64_t stream) {
    int64_t event;
    {
      std::lock_guard<std::mutex> guard(mutex);
      event = next_event++;
    }
    put(EVENT_RECORD, stream < 0 ? current_stream : stream, event);
    return event;
  });
  m.def("new_stream", [] {
    std::lock_guard<std::mutex> guard(mutex);
    return next_stream++;
  });
  m.def("start", [] {
    std::lock_guard<std::mutex> guard(mutex);
    entries.clear();
    num_operators = 0;
    peak_bytes = allocated_bytes;
    is_recording = true;
  });
  m.def("stop", [] {
    std::lock_guard<std::mutex> guard(mutex);
    is_recording = false;
    return std::exchange(entries, {});
  });
  m.def("allocated_bytes", [] { return allocated_bytes; });
  m.def("peak_bytes", [] { return peak_bytes; });
  m.def("reset_peak", [] { peak_bytes = allocated_bytes; });
  m.def("set_host_wait", [](py::object function) { host_wait = new py::object(function); });
}
