// One CUDA device for a torch built without CUDA: it is there, and has streams and events in name, and no kernel and no memory. Tensors on it
// are torch's own fake tensors. Loaded before torch, which asks only once whether there is such a device.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device device{c10::DeviceType::CUDA, 0};
std::atomic<int64_t> num_made{0};
thread_local c10::StreamId current = 0;

c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device, id); }

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return device; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(current); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(++num_made); }
  c10::Stream exchangeStream(c10::Stream next) const noexcept override { return stream(std::exchange(current, next.id())); }
  void record(void **event, const c10::Stream &, c10::DeviceIndex, c10::EventFlag) const override { *event = (void *)++num_made; }
  void block(void *, const c10::Stream &) const override {}
  bool queryEvent(void *) const override { return true; }
  void synchronizeEvent(void *) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
};

c10::impl::DeviceGuardImplRegistrar guard{c10::DeviceType::CUDA, new Guard()};

} // namespace

namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks);
} // namespace at
